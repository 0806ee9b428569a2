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

int ncp_exit(struct pt_regs *ctx) {
  u64 now = bpf_ktime_get_ns();
  u64 cookie = ncp_cookie(ctx), key = bpf_get_current_pid_tgid();
  u32 api = NCP_COOKIE_API(cookie), lib = NCP_COOKIE_LIB(cookie);
  struct ncp_thread *th = threads.lookup(&key);
  if (!th) {
    ncp_count(NCP_STAT_NO_ENTRY);
    return 0;
  }
  if (th->denied) return 0;
  struct ncp_record *r = &th->rec;
  /* Matched by the stack, not by counting: a call left by longjmp, or one that
   * NCCL makes inside, cannot shift the pairing. */
  int same_frame = api == r->api && ncp_sp(ctx) == th->sp + NCP_RETURN_POPS;
  if (!th->active || !same_frame || lib != r->lib) {
    if (th->active && api == NCP_API_GET_UNIQUE_ID) {
      if (r->api == NCP_API_COMM_INIT_ALL && ncp_rc(ctx) == NCP_SUCCESS) ncp_hash_uid(r, th->aux);
    } else if (same_frame && lib != r->lib && th->dups) {
      th->dups--;
    } else if (!th->active && api != NCP_API_GET_UNIQUE_ID) {
      ncp_count(NCP_STAT_NO_ENTRY);
    }
    return 0;
  }

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
    if (bpf_probe_read_user_str(&r->count, NCP_NAME_SIZE, (void *)th->name) > 1) ncp_emit(th);
  }
  return 0;
}

#endif
