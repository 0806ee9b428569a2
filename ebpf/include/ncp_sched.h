/* Ends of threads and images, from raw tracepoints (no tracefs needed). */
#ifndef NCP_SCHED_H
#define NCP_SCHED_H

/* The last thread of a process frees its entry in `procs`; what belongs to its
 * epoch elsewhere is freed by user space, which may still want to read it. */

static __always_inline void ncp_thread_gone(u64 key) {
  u32 tgid = key >> 32;
  struct ncp_thread *th = threads.lookup(&key);
  if (!th) return;
  u32 epoch = th->epoch;
  if (th->active) {
    th->active = 0;
    th->rec.t_exit = bpf_ktime_get_ns();
    th->rec.flags |= NCP_FLAG_NO_RETURN;
    ncp_count(NCP_STAT_NO_RETURN);
    ncp_emit(th);
  }
  struct ncp_tally *t = tallies.lookup(&epoch);
  if (t) __sync_fetch_and_add(&t->captured, th->captured);
  struct ncp_pending_key pk = {.thread = key};
  for (u32 i = 0; th->pending && i < NCP_PENDING_PER_THREAD; i++) {
    pk.slot = i;
    pending.delete(&pk);
  }
  threads.delete(&key);
  struct ncp_proc *p = procs.lookup(&tgid);
  if (!p || p->epoch != epoch) return;
  u64 before = __sync_fetch_and_add(&p->threads, -1);
  if (before == 1 && p->leader_gone) procs.delete(&tgid);
}

int ncp_sched_exit(struct bpf_raw_tracepoint_args *ctx) {
  u64 key = bpf_get_current_pid_tgid();
  u32 tgid = key >> 32;
  ncp_thread_gone(key);
  if (tgid == (u32)key) {
    struct ncp_proc *p = procs.lookup(&tgid);
    if (p) {
      p->leader_gone = 1;
      if (p->threads == 0) procs.delete(&tgid);
    }
  }
  return 0;
}

/* A new image: nothing that is known of the process holds any more. The other
 * threads have exited before; this one may have had another id. */
int ncp_sched_exec(struct bpf_raw_tracepoint_args *ctx) {
  u64 key = bpf_get_current_pid_tgid();
  u32 tgid = key >> 32, old = (u32)ctx->args[1];
  if (!procs.lookup(&tgid)) return 0;
  ncp_thread_gone(key);
  if (old != (u32)key) ncp_thread_gone((u64)tgid << 32 | old);
  procs.delete(&tgid);
  return 0;
}

#endif
