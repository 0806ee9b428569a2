/* The file that a traced process shares with its collector.
 *
 * One file per process: a header, a slot per thread, copies of the records that
 * made communicators, and a ring of records per slot. Every ring has one writer,
 * the thread that holds its slot, so writing needs no atomic operation. The
 * newest record overwrites the oldest. The file outlives the process, however it
 * ends. nccluprobe/capture/preload_layout.py reads these places. */
#ifndef NCP_SHM_H
#define NCP_SHM_H

#include "../../ebpf/include/ncp_record.h"

#define NCP_SHM_MAGIC "NCPRING\n"
#define NCP_SHM_VERSION 1
#define NCP_SHM_SLOTS 128
#define NCP_SHM_SLOT_SIZE 256
#define NCP_SHM_COPIES 4
#define NCP_SHM_BIRTHS 1024
#define NCP_SHM_ENVIRON 3072
#define NCP_SHM_HEADER_SIZE 8192
#define NCP_SHM_PATH 384

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

/* A copy of NCCL in the process. */
struct ncp_shm_copy {
  u64 base;
  u64 dev;
  u64 ino;
  u32 version;   /* ncclGetVersion's number, 0: unknown */
  u32 hash_form; /* 0 none, 1 up to 2.17, 2 up to 2.25, 3 today */
  /* Offsets in struct ncclComm, 0: unknown; from a file beside this one, or written
   * by the collector, rank_at last. */
  u64 rank_at; /* nRanks and cudaDev follow */
  u64 hash_at;
  u64 seq_at; /* five counters of eager collectives, by function */
  u64 end_magic_at;
  u64 magics; /* whether there are magics, one at the start */
  char path[NCP_SHM_PATH];
};

/* A thread's place. The first cache line is written by the thread only. */
struct ncp_shm_slot {
  u64 seq;  /* odd: the thread is inside the call whose record is at `head` */
  u64 head; /* records published so far */
  u32 tid;  /* 0: never used; the last thread that held it */
  u32 denied;
  u64 lost; /* records that it could not keep */
  u64 blind;
  u64 nested;
  u64 unwound;
  u64 zero;
  u8 apart[64];
  u64 read;        /* written by the collector: records it has taken */
  u64 overwritten; /* written by the collector: those it came too late for */
  u8 rest[112];
};

/* What is known of a communicator: the record that made it, in KIND_NEW_COMM's
 * form (kind 0: not seen), its name, and what its struct said (kind 0: nothing). */
struct ncp_shm_birth {
  u64 seq; /* even: whole */
  u32 gen;
  u32 closed;
  struct ncp_record rec;
  struct ncp_record identity;
  char name[NCP_NAME_SIZE];
};

struct ncp_shm {
  char magic[8]; /* written last */
  u32 version;
  u32 record_version;
  u32 record_size;
  u32 slots;
  u64 slots_at;
  u64 births_at;
  u64 rings_at;
  u64 ring_bytes; /* distance of two rings */
  u32 ring_records;
  u32 births;
  u32 pid; /* as the process sees it */
  u32 uid;
  u32 gid;
  u32 copies;
  u64 start_ticks;     /* /proc/PID/stat's, of the initial time namespace */
  long long time_off;  /* what was added to its clock to get the initial one's */
  u64 born;            /* initial CLOCK_MONOTONIC */
  u64 file_size;
  u64 lost;            /* calls of threads that got no slot */
  u64 births_made;
  u64 unwrapped;       /* copies beyond NCP_SHM_COPIES: not traced */
  u32 denied;          /* written by the collector: record nothing more */
  u32 top;             /* slots from here on were never taken */
  char boot_id[40];
  char exe[64];
  char host[72];
  struct ncp_shm_copy copy[NCP_SHM_COPIES];
  char environ[NCP_SHM_ENVIRON]; /* NAME=VALUE\0, of the launcher's variables only */
};

_Static_assert(sizeof(struct ncp_shm_copy) == 456, "copy");
_Static_assert(sizeof(struct ncp_shm_slot) == NCP_SHM_SLOT_SIZE, "slot");
_Static_assert(__builtin_offsetof(struct ncp_shm_slot, read) == 128, "read");
_Static_assert(sizeof(struct ncp_shm_birth) == 384, "birth");
_Static_assert(__builtin_offsetof(struct ncp_shm, start_ticks) == 80, "start_ticks");
_Static_assert(__builtin_offsetof(struct ncp_shm, denied) == 136, "denied");
_Static_assert(__builtin_offsetof(struct ncp_shm, boot_id) == 144, "boot_id");
_Static_assert(__builtin_offsetof(struct ncp_shm, copy) == 320, "copy");
_Static_assert(__builtin_offsetof(struct ncp_shm, environ) == 2144, "environ");
_Static_assert(sizeof(struct ncp_shm) <= NCP_SHM_HEADER_SIZE, "header");

#endif
