/* The process's file: making it, and room in it. */
#ifndef NCP_FILE_H
#define NCP_FILE_H

#include "preload.h"

NCP_INLINE struct ncp_shm_slot *ncp_slot(u32 i) {
  return (struct ncp_shm_slot *)((char *)ncp_shm + ncp_shm->slots_at) + i;
}

NCP_INLINE struct ncp_record *ncp_ring(u32 i) {
  return (struct ncp_record *)((char *)ncp_shm + ncp_shm->rings_at + i * ncp_shm->ring_bytes);
}

NCP_COLD int ncp_file_disabled(void);
NCP_COLD int ncp_other_front(void);
NCP_COLD int ncp_file_make(const char **what);
NCP_COLD int ncp_file_reserve(u32 slot);
NCP_COLD void ncp_file_layout(struct ncp_shm_copy *copy, u64 size);

#endif
