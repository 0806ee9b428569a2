/* The thread's open groups, for both fronts: ends return the depth before the call.
 * struct ncp_thread is the front's own; `next`: groups so far, of all threads. */
#ifndef NCP_GROUP_H
#define NCP_GROUP_H

static inline __attribute__((always_inline)) void ncp_group(struct ncp_thread *th,
                                                            struct ncp_record *r, u64 *next,
                                                            u32 api, u32 class) {
  r->group_depth = th->depth;
  if (api == NCP_API_GROUP_START && th->depth == 0) {
    th->group_id = (u32)__sync_fetch_and_add(next, 1) + 1;
    th->group_pos = 0;
  }
  r->group_id = th->group_id;
  r->group_pos = th->group_pos;
  if (api == NCP_API_GROUP_START) {
    if (th->depth < 255) th->depth++;
  } else if (class == NCP_CLASS_GROUP) {
    if (th->depth) th->depth--;
    if (th->depth == 0) th->group_id = th->group_pos = 0;
  } else if (th->depth && th->group_pos < 65535) {
    th->group_pos++;
  }
}

#endif
