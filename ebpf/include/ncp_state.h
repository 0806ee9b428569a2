/* Threads, processes and the ring. */
#ifndef NCP_STATE_H
#define NCP_STATE_H

/* Programs of uprobes can be preempted: even a per-CPU counter needs an atomic. */
static __always_inline void ncp_count(u32 what) {
  u64 *n = stats.lookup(&what);
  if (n) __sync_fetch_and_add(n, 1);
}

static __always_inline struct ncp_globals *ncp_globals(void) {
  u32 zero = 0;
  return globals.lookup(&zero);
}

static __always_inline u32 ncp_version(void) {
  u32 zero = 0, *v = deny_version.lookup(&zero);
  return v ? *v : 0;
}

static __always_inline void ncp_count_lost(u32 epoch) {
  ncp_count(NCP_STAT_LOST);
  struct ncp_tally *t = tallies.lookup(&epoch);
  if (t) __sync_fetch_and_add(&t->lost, 1);
}

static __always_inline void ncp_count_blind(u32 epoch) {
  struct ncp_tally *t = tallies.lookup(&epoch);
  if (t) __sync_fetch_and_add(&t->blind, 1);
}

/* One copy into the ring. No wake-up: the reader comes by itself, and waking
 * it would cost the traced thread ten times the rest of this program. */
static __always_inline void ncp_emit(struct ncp_thread *th) {
  if (ring.ringbuf_output(&th->rec, sizeof(th->rec), BPF_RB_NO_WAKEUP))
    ncp_count_lost(th->epoch);
  else
    th->captured++;
}

static __always_inline void ncp_emit_pending(struct ncp_thread *th, struct ncp_pending *p) {
  if (ring.ringbuf_output(&p->rec, sizeof(p->rec), BPF_RB_NO_WAKEUP))
    ncp_count_lost(th->epoch);
  else
    th->captured++;
}

/* The process of a thread that calls for the first time. A pid cannot be in
 * use anew while threads of its old process live, so an epoch ends when the
 * first thread is gone and no other thread that we know is left (ncp_sched.h);
 * here, a first thread that is there again shows what was missed. */
static __always_inline struct ncp_proc *ncp_proc_of(struct ncp_globals *g, u32 tgid, u32 tid) {
  struct ncp_proc *p = procs.lookup(&tgid);
  if (p && p->leader_gone && tid == tgid) {
    procs.delete(&tgid);
    p = 0;
  }
  if (p) return p;
  struct ncp_proc fresh = {.epoch = (u32)__sync_fetch_and_add(&g->next_epoch, 1) + 1};
  struct ncp_tally tally = {.pid = tgid};
  if (procs.insert(&tgid, &fresh) == 0) tallies.update(&fresh.epoch, &tally);
  return procs.lookup(&tgid);
}

static __always_inline void ncp_check_denied(struct ncp_thread *th, u32 now) {
  u32 epoch = th->epoch;
  th->version = now;
  th->denied = denied.lookup(&epoch) != 0;
  if (th->denied) th->active = 0;
}

static __always_inline struct ncp_thread *ncp_thread_new(struct ncp_globals *g, u64 key) {
  u32 zero = 0, tgid = key >> 32;
  struct ncp_thread *b = blank.lookup(&zero);
  struct ncp_proc *p = ncp_proc_of(g, tgid, (u32)key);
  if (!b) return 0;
  if (!p) {
    ncp_count(NCP_STAT_PROC_FULL);
    return 0;
  }
  u32 epoch = p->epoch;
  if (threads.insert(&key, b)) {
    ncp_count(NCP_STAT_THREAD_FULL);
    struct ncp_tally *t = tallies.lookup(&epoch);
    if (t) __sync_fetch_and_add(&t->lost, 1);
    return 0;
  }
  __sync_fetch_and_add(&p->threads, 1);
  struct ncp_thread *th = threads.lookup(&key);
  if (!th) return 0;
  th->epoch = epoch;
  ncp_check_denied(th, ncp_version());
  return th;
}

#endif
