/* Return of a traced function. */
#ifndef NCP_EXIT_H
#define NCP_EXIT_H

#define NCP_SUCCESS 0
#define NCP_IN_PROGRESS 7

/* ncclCommInitAll: one generation per device, with consecutive numbers. */
static __always_inline void ncp_made_all(struct ncp_globals *g, struct ncp_thread *th) {
  struct ncp_record *r = &th->rec;
  u32 n = r->nranks;
  if (n == 0 || n > NCP_MAX_INIT_ALL) return;
  u32 gen = ncp_new_gen(g, n);
  for (u32 i = 0; i < NCP_MAX_INIT_ALL; i++) {
    u64 ptr = 0;
    if (i >= n) break;
    if (bpf_probe_read_user(&ptr, sizeof(ptr), (void *)(th->out + i * 8)) || !ptr) continue;
    if (!ncp_comm_made(th, gen + i, ptr, r->uid_hash)) r->flags |= NCP_FLAG_BLIND;
    if (i == 0) r->new_comm = ptr;
  }
  r->new_gen = gen;
}

/* What the call made. A failed call leaves the caller's handle as it was. */
static __always_inline void ncp_made(struct ncp_globals *g, struct ncp_thread *th, u64 key,
                                     u32 api) {
  struct ncp_record *r = &th->rec;
  u64 ptr = 0;
  if (api == NCP_API_COMM_INIT_ALL) {
    ncp_made_all(g, th);
    return;
  }
  if (bpf_probe_read_user(&ptr, sizeof(ptr), (void *)th->out)) return;
  if (ptr) {
    r->new_comm = ptr;
    r->new_gen = ncp_comm_made(th, ncp_new_gen(g, 1), ptr, r->uid_hash);
    if (!r->new_gen) r->flags |= NCP_FLAG_BLIND;
  } else if (!(api == NCP_API_COMM_SPLIT && r->color == -1)) {
    ncp_defer(th, key);
  }
}

/* A return that is not that of the call the thread is inside. */
static __always_inline void ncp_other_exit(struct pt_regs *ctx, struct ncp_thread *th) {
  u32 api = NCP_COOKIE_API(ncp_cookie(ctx));
  if (th->denied) return;
  if (api == NCP_API_GET_UNIQUE_ID) {
    /* Made by ncclCommInitAll for itself: the hash of what it is making. */
    if (th->active && th->rec.api == NCP_API_COMM_INIT_ALL && ncp_rc(ctx) == NCP_SUCCESS)
      ncp_hash_uid(&th->rec, th->aux);
  } else if (!th->active) {
    if (th->dups && th->rec.api == api)
      th->dups--;
    else
      ncp_count(NCP_STAT_NO_ENTRY);
  }
}

int ncp_exit(struct pt_regs *ctx) {
  u64 now = bpf_ktime_get_ns(), key = bpf_get_current_pid_tgid();
  struct ncp_thread *th = threads.lookup(&key);
  if (!th) {
    ncp_count(NCP_STAT_NO_ENTRY);
    return 0;
  }
  /* Matched by the stack, not by counting: a call left by longjmp, or one that
   * NCCL makes inside, cannot shift the pairing. */
  if (!th->active || ncp_sp(ctx) != th->sp + NCP_RETURN_POPS) {
    ncp_other_exit(ctx, th);
    return 0;
  }

  struct ncp_record *r = &th->rec;
  u32 api = r->api;
  u32 class = ncp_api_class(api);
  s32 rc = ncp_rc(ctx);
  th->active = 0;
  r->t_exit = now;
  r->rc = rc;
  if (class != NCP_CLASS_LIFECYCLE && class != NCP_CLASS_GROUP) {
    ncp_emit(th);
    return 0;
  }

  struct ncp_globals *g = ncp_globals();
  int ok = rc == NCP_SUCCESS || rc == NCP_IN_PROGRESS;
  if (g && ok && ncp_api_makes(api)) ncp_made(g, th, key, api);
  ncp_emit(th);
  if (class == NCP_CLASS_GROUP) {
    if (g && th->pending && th->depth == 0)
      ncp_take_all(g, th, key, now, ok && api == NCP_API_GROUP_END);
  } else if (r->new_gen && th->name) {
    r->kind = NCP_KIND_NAME;
    __builtin_memset(&r->count, 0, NCP_NAME_SIZE);
    if (bpf_probe_read_user_str(&r->count, NCP_NAME_SIZE, (void *)th->name) > 1) ncp_emit(th);
  }
  return 0;
}

#endif
