/* Groups: calls and jobs are gathered per thread and take effect, all or none,
 * at the outermost GroupEnd. A single call is committed the same way. */
#include <stdlib.h>
#include <string.h>

#include "sim.h"

/* With this many plans queued on a stream the next call waits inside:
 * counted from the first of a stalled run, call 1,022. */
#define LAUNCH_DEPTH 1021

_Thread_local int sim_group_depth;
static _Thread_local ncclResult_t t_error;
static _Thread_local struct sim_call *t_calls;
static _Thread_local size_t t_ncalls, t_cap;
static _Thread_local struct sim_job *t_jobs, **t_jobs_end;

struct launch {
  struct sim_plan *plan;
  cudaStream_t stream;
  bool queued;
};

static bool runs(const struct sim_call *c) {
  return c->fn < 0 || c->comm->sim->nranks > 1; /* one rank has nobody to wait for */
}

/* All calls of one communicator make one plan on the stream of the first. */
static struct sim_plan *plan_make(const struct sim_call *calls, size_t n, struct ncclComm *comm) {
  unsigned ncoll = 0, np2p = 0;
  for (size_t i = 0; i < n; i++)
    if (calls[i].comm == comm && runs(&calls[i])) *(calls[i].fn >= 0 ? &ncoll : &np2p) += 1;
  if (ncoll + np2p == 0) return NULL;
  struct sim_plan *plan = calloc(1, sizeof *plan + ncoll * sizeof *plan->colls + np2p * sizeof *plan->p2p);
  plan->comm = comm;
  plan->colls = (struct sim_coll *)(void *)(plan + 1);
  plan->p2p = (struct sim_p2p *)(void *)(plan->colls + ncoll);
  for (size_t i = 0; i < n; i++) {
    if (calls[i].comm != comm || !runs(&calls[i])) continue;
    if (calls[i].fn >= 0) plan->colls[plan->ncoll++] = calls[i].coll;
    else plan->p2p[plan->np2p++] = calls[i].p2p;
  }
  return plan;
}

static size_t plans_make(const struct sim_call *calls, size_t n, struct launch *launches) {
  size_t count = 0;
  for (size_t i = 0; i < n; i++) {
    bool seen = false;
    for (size_t j = i; j-- > 0 && !seen;) seen = calls[j].comm == calls[i].comm;
    if (seen) continue;
    struct sim_plan *plan = plan_make(calls, n, calls[i].comm);
    if (plan) launches[count++] = (struct launch){plan, calls[i].stream, false};
  }
  return count;
}

static void count_calls(const struct sim_call *calls, size_t n, struct ncclComm *comm) {
#if SIM_VERSION_CODE >= 22600
  for (size_t i = 0; i < n; i++)
    if (calls[i].comm == comm && calls[i].fn >= 0 && runs(&calls[i]))
      atomic_fetch_add(&comm->seqNumber[calls[i].fn], 1);
#else
  (void)calls, (void)n;
#endif
  static int proxies = -1; /* from 2.27 on only plans with proxy operations count */
  if (proxies < 0) proxies = SIM_VERSION_CODE < 22700 || sim_env("SIMNCCL_PROXY", 0);
  if (proxies) comm->opCount += 1;
}

/* The host's block at a communicator's first collective and at new peers. */
static ncclResult_t wait_connected(struct launch *launches, size_t n) {
  for (size_t i = 0; i < n; i++) {
    struct sim_plan *plan = launches[i].plan;
    for (;;) {
      int dead = sim_comm_dead(plan->comm);
      if (dead) return (ncclResult_t)dead;
      if (sim_plan_connected(plan)) break;
      if (plan->comm->sim->nonblocking) {
        plan->need_connect = true;
        atomic_store(&plan->comm->asyncResult, ncclInProgress);
        break;
      }
      sim_wait(plan->comm->sim->shm, 1000);
    }
  }
  return ncclSuccess;
}

static ncclResult_t wait_queue(struct ncclComm *comm, struct sim_stream *stream) {
  static long depth;
  if (!depth) depth = sim_env("SIMNCCL_LAUNCH_DEPTH", LAUNCH_DEPTH);
  while (!comm->sim->nonblocking && stream->queued >= (unsigned)depth) {
    sim_pump();
    int dead = sim_comm_dead(comm);
    if (dead) return (ncclResult_t)dead;
    if (stream->queued >= (unsigned)depth) sim_wait(sim_stream_shm(stream), 1000);
  }
  return ncclSuccess;
}

static ncclResult_t launch_all(const struct sim_call *calls, size_t n, struct launch *launches,
                               size_t count) {
  ncclResult_t rc = ncclSuccess;
  bool progress = false;
  if (SIM_VERSION_CODE >= 22200 || launches[0].plan->np2p) {
    for (size_t i = 0; i < count; i++) sim_plan_connect(launches[i].plan);
    rc = wait_connected(launches, count);
  }
  for (size_t i = 0; i < count && rc == ncclSuccess; i++) {
    struct ncclComm *comm = launches[i].plan->comm;
    struct sim_stream *stream = sim_stream_get(launches[i].stream, comm->sim->dev);
    rc = wait_queue(comm, stream);
    if (rc != ncclSuccess) break;
    progress = progress || launches[i].plan->need_connect;
    count_calls(calls, n, comm);
    sim_enqueue(stream, launches[i].plan);
    launches[i].queued = true;
  }
  if (sim_pump()) sim_kick();
  return rc == ncclSuccess && progress ? ncclInProgress : rc;
}

ncclResult_t sim_submit(const struct sim_call *calls, size_t n) {
  if (sim_group_depth > 0) {
    if (t_ncalls + n > t_cap) {
      t_cap = (t_ncalls + n) * 2;
      t_calls = realloc(t_calls, t_cap * sizeof *t_calls);
    }
    memcpy(t_calls + t_ncalls, calls, n * sizeof *calls);
    t_ncalls += n;
    return ncclSuccess;
  }
  struct launch few[4], *launches = n <= 4 ? few : calloc(n, sizeof *launches);
  size_t count = plans_make(calls, n, launches);
  ncclResult_t rc = ncclSuccess;
  if (count) {
    sim_lock();
    for (size_t i = 0; i < n; i++) calls[i].comm->sim->inuse++;
    rc = launch_all(calls, n, launches, count);
    for (size_t i = 0; i < n; i++) calls[i].comm->sim->inuse--;
    sim_unlock();
  }
  for (size_t i = 0; i < count; i++)
    if (!launches[i].queued) free(launches[i].plan);
  if (launches != few) free(launches);
  return rc;
}

ncclResult_t sim_group_add_job(struct sim_job *job) {
  if (!t_jobs) t_jobs_end = &t_jobs;
  *t_jobs_end = job;
  t_jobs_end = &job->next;
  return ncclSuccess;
}

ncclResult_t sim_group_error(ncclResult_t rc) {
  if (sim_group_depth > 0 && rc != ncclSuccess && rc != ncclInProgress && t_error == ncclSuccess)
    t_error = rc;
  return rc;
}

static void drop_jobs(struct sim_job *jobs) {
  sim_lock();
  while (jobs) {
    struct sim_job *job = jobs;
    jobs = job->next;
    if (job->kind != JOB_JOIN || job->parent) job->parent->sim->xmade -= job->kind != JOB_JOIN;
    if (job->comm) {
      *job->out = NULL;
      sim_comm_free(job->comm);
    }
    free(job);
  }
  sim_unlock();
}

SIM_API(ncclResult_t, ncclGroupStart, void) {
  sim_group_depth++;
  return ncclSuccess;
}

SIM_API(ncclResult_t, ncclGroupEnd, void) {
  if (sim_group_depth == 0)
    return sim_fail(ncclInvalidUsage, "ncclGroupEnd: not in a group call.");
  if (--sim_group_depth > 0) return ncclSuccess;
  ncclResult_t rc = t_error;
  struct sim_job *jobs = t_jobs;
  size_t n = t_ncalls;
  t_error = ncclSuccess;
  t_jobs = NULL;
  t_ncalls = 0;
  if (rc != ncclSuccess) {
    drop_jobs(jobs);
    return rc;
  }
  if (jobs) rc = sim_jobs_run(jobs);
  if (n && (rc == ncclSuccess || rc == ncclInProgress)) {
    ncclResult_t calls_rc = sim_submit(t_calls, n);
    if (calls_rc != ncclSuccess) rc = calls_rc;
  }
  if (t_cap > 4096) {
    free(t_calls);
    t_calls = NULL;
    t_cap = 0;
  }
  return rc;
}

SIM_API(ncclResult_t, ncclGroupSimulateEnd, ncclSimInfo_t *simInfo) {
  if (sim_group_depth == 0)
    return sim_fail(ncclInvalidUsage, "ncclGroupSimulateEnd: not in a group call.");
  if (simInfo) simInfo->estimatedTime = 0.0f;
  sim_group_depth--;
  t_error = ncclSuccess;
  t_ncalls = 0;
  drop_jobs(t_jobs);
  t_jobs = NULL;
  return ncclSuccess;
}
