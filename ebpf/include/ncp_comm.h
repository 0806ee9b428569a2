/* Communicators: generations, numbers, and the new ones that calls make. */
#ifndef NCP_COMM_H
#define NCP_COMM_H

/* rc of a NCP_KIND_IDENTITY. */
#define NCP_READ_OK 0
#define NCP_READ_FAULT 1 /* a page was not there: user space tries again */
#define NCP_READ_OTHER 2 /* no communicator, by its magics or its rank */

static __always_inline u32 ncp_new_gen(struct ncp_globals *g, u64 n) {
  return (u32)__sync_fetch_and_add(&g->next_gen, n) + 1;
}

/* A generation opened by the call that made it; whatever had the same address
 * before is over. 0: no room. */
static __always_inline u32 ncp_comm_made(struct ncp_thread *th, u32 gen, u64 ptr, u64 hash) {
  struct ncp_comm_key key = {.epoch = th->epoch, .ptr = ptr};
  struct ncp_comm comm = {.gen = gen, .flags = NCP_COMM_UNREAD, .hash = hash};
  if (comms.update(&key, &comm) == 0) return gen;
  ncp_count(NCP_STAT_COMM_FULL);
  ncp_count_blind(th->epoch);
  return 0;
}

/* A handle that an earlier call of this thread was to write, now written. */
static __always_inline void ncp_take(struct ncp_globals *g, struct ncp_thread *th,
                                     struct ncp_pending *p, u64 ptr, u64 now) {
  u32 gen = ncp_comm_made(th, ncp_new_gen(g, 1), ptr, 0);
  p->rec.t_exit = now;
  p->rec.new_comm = ptr;
  p->rec.new_gen = gen;
  ncp_emit_pending(th, p);
  if (p->name[0] && gen) {
    p->rec.kind = NCP_KIND_NAME;
    __builtin_memcpy(&p->rec.count, p->name, NCP_NAME_SIZE);
    ncp_emit_pending(th, p);
  }
}

/* The end of a group (its record is in th->rec): opens a generation for each
 * handle that its calls have written, and forgets them if the group failed. */
static __always_inline void ncp_take_all(struct ncp_globals *g, struct ncp_thread *th, u64 thread,
                                         u64 now, int ok) {
  struct ncp_pending_key key = {.thread = thread};
  th->kept = 0; /* in the map, where the verifier does not follow it */
  for (int i = 0; i < NCP_PENDING_PER_THREAD; i++) {
    key.slot = i;
    struct ncp_pending *p = pending.lookup(&key);
    if (!p) continue;
    u64 ptr = 0;
    int ours = p->rec.group_id == th->rec.group_id;
    if (ours) bpf_probe_read_user(&ptr, sizeof(ptr), (void *)p->out);
    if (!ptr && (ok || !ours)) {
      th->kept = 1; /* not blocking: another thread will write it */
      continue;
    }
    if (ok) ncp_take(g, th, p, ptr, now);
    pending.delete(&key);
  }
  if (!th->kept) th->pending = 0;
}

/* A communicator that nobody told of is used: is it one of those? */
static __always_inline void ncp_take_one(struct ncp_globals *g, struct ncp_thread *th, u64 thread,
                                         u64 now, u64 want) {
  struct ncp_pending_key key = {.thread = thread};
  struct ncp_pending *found = 0;
  for (int i = 0; i < NCP_PENDING_PER_THREAD; i++) {
    u64 ptr = 0;
    key.slot = i;
    struct ncp_pending *p = pending.lookup(&key);
    if (p && !bpf_probe_read_user(&ptr, sizeof(ptr), (void *)p->out) && ptr == want) {
      found = p;
      break;
    }
  }
  if (!found) return;
  ncp_take(g, th, found, want, now);
  pending.delete(&key);
}

/* Remembers a child whose handle is not written yet. */
static __always_inline void ncp_defer(struct ncp_thread *th, u64 thread) {
  struct ncp_pending_key key = {.thread = thread};
  struct ncp_pending p = {};
  key.slot = th->pending % NCP_PENDING_PER_THREAD;
  __builtin_memcpy(&p.rec, &th->rec, sizeof(p.rec));
  p.rec.kind = NCP_KIND_NEW_COMM;
  p.rec.call_idx = 0;
  p.rec.rc = 0;
  p.out = th->out;
  if (th->name) bpf_probe_read_user_str(p.name, sizeof(p.name), (void *)th->name);
  if (pending.lookup(&key)) ncp_count(NCP_STAT_PENDING_FULL);
  if (pending.update(&key, &p)) {
    ncp_count(NCP_STAT_PENDING_FULL);
    return;
  }
  th->pending++;
  if (th->pending == 0) th->pending = NCP_PENDING_PER_THREAD;
}

/* Reads the live struct of the call's communicator into `o`: NCP_READ_*, or -1
 * when it is not ready, as one that is still being made. */
static __always_inline int ncp_read_struct(struct ncp_record *o, struct ncp_lib *lib) {
  u64 at = o->comm, magic = 0;
  if (lib->magics) {
    if (bpf_probe_read_user(&magic, sizeof(magic), (void *)at)) return NCP_READ_FAULT;
    if (magic != NCP_MAGIC) return NCP_READ_OTHER;
    if (bpf_probe_read_user(&magic, sizeof(magic), (void *)(at + lib->end_magic)))
      return NCP_READ_FAULT;
    if (magic != NCP_MAGIC) return NCP_READ_OTHER;
  }
  /* The fields stand in the record as they stand in the struct. */
  if (bpf_probe_read_user(&o->peer, 12, (void *)(at + lib->rank))) return NCP_READ_FAULT;
  if (o->nranks == 0) return -1;
  if (o->peer < 0 || o->nranks < 0 || o->peer >= o->nranks) return NCP_READ_OTHER;
  if (lib->hash) {
    if (bpf_probe_read_user(&o->uid_hash, 8, (void *)(at + lib->hash))) return NCP_READ_FAULT;
    if (o->uid_hash == 0) return -1;
  }
  if (lib->seq && bpf_probe_read_user(&o->count, 40, (void *)(at + lib->seq)))
    return NCP_READ_FAULT;
  return NCP_READ_OK;
}

/* Says who a communicator is, once, at the first call on it that we see. */
static __always_inline void ncp_identify(struct ncp_thread *th, struct ncp_comm *c,
                                         struct ncp_lib *lib) {
  struct ncp_record *r = &th->rec;
  struct ncp_record *o = ring.ringbuf_reserve(sizeof(struct ncp_record));
  if (!o) return; /* no room now: at the next call */
  __builtin_memset(o, 0, sizeof(*o));
  o->t_enter = r->t_enter;
  o->comm = r->comm;
  o->pid = r->pid;
  o->tid = r->tid;
  o->epoch = r->epoch;
  o->comm_gen = c->gen;
  o->group_id = r->group_id;
  o->group_depth = r->group_depth;
  o->api = r->api;
  o->lib = r->lib;
  o->kind = NCP_KIND_IDENTITY;
  o->flags = (u8)c->flags;
  int status = ncp_read_struct(o, lib);
  u32 flags = c->flags;
  if (status < 0 && flags < NCP_COMM_TRIES * NCP_COMM_TRY) {
    c->flags = flags + NCP_COMM_TRY;
    ring.ringbuf_discard(o, BPF_RB_NO_WAKEUP);
    return;
  }
  o->rc = status < 0 ? NCP_READ_OTHER : status;
  flags &= ~NCP_COMM_UNREAD;
  c->flags = status == NCP_READ_OK ? flags | NCP_COMM_SOUND : flags;
  ring.ringbuf_submit(o, BPF_RB_NO_WAKEUP);
  th->captured++;
}

/* What the live struct tells of a call on it. */
static __always_inline void ncp_live(struct ncp_thread *th, struct ncp_comm *c, u32 api,
                                     u32 class) {
  struct ncp_record *r = &th->rec;
  u32 id = r->lib;
  struct ncp_lib *lib = libs.lookup(&id);
  if (!lib || !lib->rank) return;
  if (c->flags & NCP_COMM_UNREAD) ncp_identify(th, c, lib);
  if (class != NCP_CLASS_COLLECTIVE || r->group_id || !lib->seq) return;
  if (!(c->flags & NCP_COMM_SOUND)) return;
  s32 slot = ncp_api_seq_slot(api);
  if (slot < 0) return;
  u64 seq;
  if (!bpf_probe_read_user(&seq, sizeof(seq), (void *)(r->comm + lib->seq + slot * 8)))
    r->nccl_seq = seq;
}

/* Identity and numbers of a call, from the communicator it was passed. They
 * are taken here, before anything can be lost: a lost record leaves a hole. */
static __always_inline void ncp_number(struct ncp_globals *g, struct ncp_thread *th, u64 thread,
                                       u32 api, u32 class) {
  struct ncp_record *r = &th->rec;
  struct ncp_comm_key key = {.epoch = th->epoch, .ptr = r->comm};
  struct ncp_comm *c = comms.lookup(&key);
  if (!c && ncp_api_closes(api)) return; /* never used since we came: nothing to number */
  if (!c && th->pending) {
    ncp_take_one(g, th, thread, r->t_enter, r->comm);
    c = comms.lookup(&key);
  }
  if (!c) {
    struct ncp_comm late = {.gen = ncp_new_gen(g, 1), .flags = NCP_FLAG_COMM_LATE | NCP_COMM_UNREAD};
    comms.insert(&key, &late);
    c = comms.lookup(&key);
  }
  if (!c) {
    r->flags |= NCP_FLAG_BLIND;
    ncp_count(NCP_STAT_COMM_FULL);
    ncp_count_blind(th->epoch);
    return;
  }
  r->comm_gen = c->gen;
  r->flags |= (u8)c->flags;
  r->call_idx = __sync_fetch_and_add(&c->calls, 1);
  if (!ncp_api_closes(api)) ncp_live(th, c, api, class);
  if (class == NCP_CLASS_COLLECTIVE) {
    r->order_idx = __sync_fetch_and_add(&c->collectives, 1);
  } else if (class == NCP_CLASS_P2P) {
    struct ncp_p2p_key pk = {.epoch = th->epoch, .gen = c->gen, .peer = r->peer};
    pk.direction = ncp_api_direction(api);
    u64 zero = 0, *n = p2p.lookup(&pk);
    if (!n) {
      p2p.insert(&pk, &zero);
      n = p2p.lookup(&pk);
    }
    if (n) {
      r->order_idx = __sync_fetch_and_add(n, 1);
    } else {
      r->flags |= NCP_FLAG_BLIND;
      ncp_count(NCP_STAT_P2P_FULL);
      ncp_count_blind(th->epoch);
    }
  } else if (class == NCP_CLASS_LIFECYCLE) {
    if (ncp_api_child(api)) r->order_idx = __sync_fetch_and_add(&c->children, 1) + 1;
    if (ncp_api_closes(api)) comms.delete(&key);
  }
}

#endif
