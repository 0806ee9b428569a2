/* What a wrapper does around the real function: the hot path. The semantics are
 * those of ebpf/include/ncp_enter.h and ncp_exit.h. */
#ifndef NCP_CALL_H
#define NCP_CALL_H

#include "preload.h"

#include "../../ebpf/include/ncp_group.h"

/* One call of a wrapper; on its stack. */
struct ncp_call {
  void *real;
  struct ncp_thread *th;  /* 0: not recorded */
  struct ncp_record *rec; /* in the ring, where it will be published */
  volatile u64 token;     /* tells whether the call is still on the stack */
};

/* Starts a call: finds the function and, unless NCCL itself is calling, opens a
 * record with everything but the arguments. */
NCP_INLINE void ncp_enter(struct ncp_call *c, unsigned set, unsigned api, uintptr_t from,
                          uintptr_t frame) {
  struct ncp_thread *th = ncp_self;
  u32 copy = set;
  c->th = 0;
  if (unlikely(!th || !th->alive)) th = ncp_thread_start();
  if (set == NCP_EXPORTED) {
    const struct ncp_binding *b = ncp_load(&ncp_bindings[api]);
    if (unlikely(!b || from - b->lo >= b->span)) b = ncp_bind(api, from, th);
    c->real = b->real;
    copy = b->copy;
    if (unlikely(copy >= NCP_SHM_COPIES)) {
      ncp_untraced(th, copy);
      return;
    }
  } else {
    c->real = ncp_copies[set].real[api];
  }
  if (unlikely(!th || th->slot->denied)) return;
  u64 now = ncp_now(th);
  if (unlikely(th->inside)) {
    if (ncp_is_nested(th, api, frame, now)) return;
  }
  struct ncp_record *r = th->rec;
  c->th = th;
  c->rec = r;
  __builtin_memset(r, 0, sizeof(*r));
  r->t_enter = now;
  r->nccl_seq = NCP_UNKNOWN_SEQ;
  r->pid = th->pid;
  r->tid = th->tid;
  r->api = (u16)api;
  r->lib = (u16)copy;
  r->kind = NCP_KIND_CALL;
  th->copy = (u16)copy;
  th->frame = frame;
}

/* A helper's call: never recorded, but NCCL may make it for a call that is. */
NCP_INLINE void ncp_look(struct ncp_call *c, unsigned set, unsigned api, uintptr_t from,
                         uintptr_t frame) {
  struct ncp_thread *th = ncp_self;
  int inside = th && th->alive && th->inside && frame < th->frame;
  c->th = inside ? th : 0;
  if (set == NCP_EXPORTED) {
    const struct ncp_binding *b = ncp_load(&ncp_bindings[api]);
    if (unlikely(!b || from - b->lo >= b->span)) b = ncp_bind(api, from, c->th);
    c->real = b->real;
  } else {
    c->real = ncp_copies[set].real[api];
  }
}

NCP_INLINE void ncp_blind(struct ncp_thread *th, struct ncp_record *r) {
  r->flags |= NCP_FLAG_BLIND;
  ncp_poke(&th->slot->blind, th->slot->blind + 1);
}

/* What the live struct tells of a call on it. */
NCP_INLINE void ncp_live(struct ncp_thread *th, struct ncp_comm *c, unsigned api, int class) {
  const struct ncp_shm_copy *lib = &ncp_shm->copy[th->copy];
  if (!ncp_load(&lib->rank_at)) return;
  u64 look = ncp_peek(&c->look);
  if (unlikely(!(look & NCP_LOOK_DONE))) look = ncp_identify(th, c);
  int slot = ncp_api_seq_slot(api);
  if (class != NCP_CLASS_COLLECTIVE || slot < 0 || th->group_id || !(look & NCP_LOOK_SOUND)) return;
  if (lib->seq_at)
    th->rec->nccl_seq = ncp_peek((u64 *)(uintptr_t)(th->rec->comm + lib->seq_at) + slot);
}

/* Identity and numbers, from the communicator passed: before anything can be
 * overwritten, so that a record that is leaves a hole. */
NCP_INLINE void ncp_count(struct ncp_thread *th, unsigned api, int class) {
  struct ncp_record *r = th->rec;
  struct ncp_comm *c = th->last;
  if (!r->comm) return;
  if (unlikely(th->last_ptr != r->comm)) {
    c = ncp_comm_find(r->comm, !ncp_api_closes(api));
    if (c) {
      th->last_ptr = r->comm;
      th->last = c;
    }
  }
  u64 life = c ? ncp_load(&c->life) : 0;
  if (unlikely(!life)) {
    if (ncp_api_closes(api)) return; /* never used since we came: nothing to number */
    if (th->pending) {
      ncp_take_one(th, r->t_enter, r->comm);
      r = th->rec; /* a child was told of first */
      life = c ? ncp_load(&c->life) : 0;
    }
    if (!life && c) life = ncp_comm_late(c);
    if (!life) {
      ncp_blind(th, r);
      return;
    }
  }
  r->comm_gen = (u32)life;
  if (unlikely(life & NCP_LATE)) r->flags |= NCP_FLAG_COMM_LATE;
  if (!ncp_api_closes(api)) {
    ncp_live(th, c, api, class);
    r = th->rec;
  }
  r->call_idx = ncp_add(&c->calls, 1);
  if (class == NCP_CLASS_COLLECTIVE) {
    r->order_idx = ncp_add(&c->collectives, 1);
  } else if (class == NCP_CLASS_P2P) {
    u64 n = 0;
    if (likely(ncp_p2p_next(c, (u32)life, ncp_api_direction(api), r->peer, &n)))
      r->order_idx = n;
    else
      ncp_blind(th, r);
  } else if (class == NCP_CLASS_LIFECYCLE) {
    if (ncp_api_child(api)) r->order_idx = ncp_add(&c->children, 1) + 1;
    if (ncp_api_closes(api)) ncp_comm_closed(c);
  }
}

/* The arguments are in the record: numbers it, and shows it as inside. */
NCP_INLINE void ncp_begin(struct ncp_call *c, unsigned api, u64 out, u64 uid, u64 config) {
  struct ncp_thread *th = c->th;
  struct ncp_record *r = c->rec;
  int class = ncp_api_class(api);
  ncp_group(th, r, &ncp_state->next_group, api, (u32)class);
  if (class != NCP_CLASS_GROUP) ncp_count(th, api, class);
  c->rec = r = th->rec;
  if (class == NCP_CLASS_LIFECYCLE) ncp_life_enter(th, r, out, uid, config);
  th->inside = api;
  th->token = (u64)(uintptr_t)c ^ r->t_enter;
  c->token = th->token;
  ncp_store(&th->slot->seq, ++th->seq);
}

/* The real function has returned. */
NCP_INLINE void ncp_exit(struct ncp_call *c, unsigned api, int rc) {
  struct ncp_thread *th = c->th;
  struct ncp_record *r = c->rec;
  c->token = 0;
  /* Forked meanwhile, or the call was given up for lost. */
  if (unlikely(!th->alive || th->inside != api || th->rec != r)) return;
  int class = ncp_api_class(api);
  u64 now = ncp_now(th);
  r->t_exit = now;
  r->rc = rc;
  th->inside = 0;
  int ok = rc == 0 || rc == 7; /* ncclSuccess, ncclInProgress */
  if (class == NCP_CLASS_LIFECYCLE && ok && ncp_api_makes(api)) {
    ncp_life_exit(th, r, now);
  } else {
    ncp_emit(th);
    if (class == NCP_CLASS_GROUP && unlikely(th->pending) && th->depth == 0)
      ncp_group_exit(th, now, ok && api == NCP_API_GROUP_END);
  }
  ncp_store(&th->slot->seq, ++th->seq);
}

#endif
