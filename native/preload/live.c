/* The live struct of a communicator: who it is, once, at the first call on it that
 * finds it ready. The same as ncp_identify in ebpf/include/ncp_comm.h. */
#include "preload.h"

#define MAGIC 0x0280028002800280ULL
#define READ_OK 0
#define READ_FAULT 1
#define READ_OTHER 2
#define NOT_READY 3 /* it is still being made */

static int get(u64 at, void *to, size_t bytes) {
  if (!ncp_readable(at, bytes)) return 0;
  __builtin_memcpy(to, (const void *)(uintptr_t)at, bytes);
  return 1;
}

static int read_struct(struct ncp_record *o, const struct ncp_shm_copy *lib) {
  u64 magic = 0;
  if (lib->magics) {
    if (!get(o->comm, &magic, 8)) return READ_FAULT;
    if (magic != MAGIC) return READ_OTHER;
    if (!get(o->comm + lib->end_magic_at, &magic, 8)) return READ_FAULT;
    if (magic != MAGIC) return READ_OTHER;
  }
  /* The fields stand in the record as they stand in the struct: rank, nRanks,
   * cudaDev; and the five counters. */
  if (!get(o->comm + lib->rank_at, &o->peer, 12)) return READ_FAULT;
  if (o->nranks == 0) return NOT_READY;
  if (o->peer < 0 || o->nranks < 0 || o->peer >= o->nranks) return READ_OTHER;
  if (lib->hash_at) {
    if (!get(o->comm + lib->hash_at, &o->uid_hash, 8)) return READ_FAULT;
    if (o->uid_hash == 0) return NOT_READY;
  }
  u64 seqs[5];
  if (lib->seq_at) {
    if (!get(o->comm + lib->seq_at, seqs, sizeof(seqs))) return READ_FAULT;
    o->count = seqs[0];
    o->stream = seqs[1];
    o->call_idx = seqs[2];
    o->order_idx = seqs[3];
    o->nccl_seq = seqs[4];
  }
  return READ_OK;
}

/* Called with a record half written at th->rec, which moves when it says who the
 * communicator is. Its `look` afterwards. */
u64 ncp_identify(struct ncp_thread *th, struct ncp_comm *c) {
  struct ncp_record half = *th->rec, *o = th->rec;
  u64 look = ncp_peek(&c->look);
  __builtin_memset(o, 0, sizeof(*o));
  o->t_enter = o->t_exit = half.t_enter;
  o->comm = half.comm;
  o->pid = half.pid;
  o->tid = half.tid;
  o->comm_gen = half.comm_gen;
  o->group_id = half.group_id;
  o->group_depth = half.group_depth;
  o->api = half.api;
  o->lib = half.lib;
  o->kind = NCP_KIND_IDENTITY;
  o->flags = half.flags & NCP_FLAG_COMM_LATE;
  int status = read_struct(o, &ncp_shm->copy[th->copy]);
  if (status == NOT_READY && look < NCP_LOOK_TRIES * NCP_LOOK_TRY) {
    ncp_add(&c->look, NCP_LOOK_TRY);
    *o = half;
    return 0;
  }
  u64 done = NCP_LOOK_DONE | (status == READ_OK ? NCP_LOOK_SOUND : 0);
  if (__atomic_fetch_or(&c->look, done, __ATOMIC_RELAXED) & NCP_LOOK_DONE) {
    *o = half; /* another thread was first */
    return done;
  }
  o->rc = status == NOT_READY ? READ_OTHER : status;
  ncp_birth_identity(c, o);
  ncp_emit(th);
  *th->rec = half;
  return done;
}
