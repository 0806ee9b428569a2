/* Init, split, shrink, grow and window registration as jobs that are polled:
 * blocking calls poll until done, GroupEnd polls all jobs of the group at once,
 * non-blocking ones are polled by the device thread. */
#include <stdlib.h>
#include <string.h>

#include "sim.h"

static struct sim_job *g_pending; /* non-blocking jobs under way; under the lock */

struct ncclComm *sim_comm_new(const ncclConfig_t *config) {
  struct ncclComm *comm = calloc(1, sizeof *comm);
  comm->sim = calloc(1, sizeof *comm->sim);
  comm->sim->dev = sim_device();
#if SIM_VERSION_CODE >= 22100
  comm->startMagic = comm->endMagic = SIM_MAGIC;
#endif
  if (config) comm->config = *config;
  else comm->config.blocking = NCCL_CONFIG_UNDEF_INT;
  if (comm->config.blocking == NCCL_CONFIG_UNDEF_INT)
    comm->config.blocking = (int)sim_env("NCCL_COMM_BLOCKING", 1);
  comm->sim->nonblocking = comm->config.blocking == 0;
  atomic_store(&comm->asyncResult, ncclInProgress);
  return comm;
}

void sim_comm_free(struct ncclComm *comm) {
  if (comm->sim->shm) sim_shm_leave(comm->sim->shm);
  free(comm->sim->sig_taken);
  free(comm->sim);
#if SIM_VERSION_CODE >= 22100
  comm->startMagic = comm->endMagic = 0; /* a stale pointer is told apart */
#endif
  free(comm);
}

/* ---- the steps; each returns the next step ---- */
static enum sim_job_step job_end(struct sim_job *job, ncclResult_t rc) {
  job->result = rc;
  return STEP_DONE;
}

static enum sim_job_step job_post(struct sim_job *job) {
  if (job->kind == JOB_JOIN) return STEP_JOIN;
  struct sim_state *ps = job->parent->sim;
  if (job->gen != ps->xdone + 1) return STEP_POST; /* an earlier exchange is under way */
  struct sim_rank *me = &ps->shm->seg->ranks[ps->rank];
  uint64_t value = (uint64_t)(uint32_t)job->color << 32 | (uint32_t)job->order;
  atomic_store(&me->xval[job->gen % 2], value);
  atomic_store(&me->xgen, job->gen);
  sim_ring(ps->shm);
  return STEP_EXCHANGE;
}

/* Who has my colour, and how many of them stand before me. */
static void split_place(struct sim_job *job) {
  struct sim_state *ps = job->parent->sim;
  job->nranks = job->rank = 0;
  for (int r = 0; r < ps->nranks; r++) {
    uint64_t value = atomic_load(&ps->shm->seg->ranks[r].xval[job->gen % 2]);
    int color = (int)(uint32_t)(value >> 32), order = (int)(uint32_t)value;
    if (color != job->color) continue;
    job->nranks++;
    if (order < job->order || (order == job->order && r < ps->rank)) job->rank++;
  }
}

static enum sim_job_step job_exchange(struct sim_job *job) {
  struct sim_state *ps = job->parent->sim;
  ps->shm->seen = atomic_load(&ps->shm->seg->bell);
  for (int r = 0; r < ps->nranks; r++)
    if (atomic_load(&ps->shm->seg->ranks[r].xgen) < job->gen) return STEP_EXCHANGE;
  if (job->kind == JOB_SPLIT && job->color >= 0) split_place(job);
  ps->xdone = job->gen;
  if (job->kind == JOB_SPLIT && job->color >= 0) return STEP_JOIN;
  return job_end(job, ncclSuccess);
}

static enum sim_job_step job_join(struct sim_job *job) {
  struct sim_state *st = job->comm->sim;
  sim_info(job->comm, "%s comm %p rank %d nranks %d cudaDev %d nvmlDev %d busId 0 commId 0x%llx - Init START",
           job->api, (void *)job->comm, job->rank, job->nranks, st->dev, st->dev,
           (unsigned long long)job->log_id);
  ncclResult_t rc = sim_shm_join(job->key, job->nranks, job->rank, &st->shm);
  if (rc != ncclSuccess) return job_end(job, rc);
  st->key = job->key;
  st->rank = job->rank;
  st->nranks = job->nranks;
  st->sig_taken = calloc((size_t)job->nranks, sizeof *st->sig_taken);
  return STEP_WAIT;
}

static enum sim_job_step job_wait(struct sim_job *job) {
  struct ncclComm *comm = job->comm;
  struct sim_state *st = comm->sim;
  st->shm->seen = atomic_load(&st->shm->seg->bell);
  if (st->shm->conflict || atomic_load(&st->shm->seg->joined) < (uint32_t)job->nranks)
    return STEP_WAIT;
  comm->magic = job->magic;
#if SIM_VERSION_CODE >= 21800
  comm->commHash = job->hash;
#endif
  comm->rank = job->rank;
  comm->nRanks = job->nranks;
  comm->cudaDev = st->dev;
  comm->nNodes = 1;
  comm->localRank = job->rank;
  st->ready = true;
  sim_info(comm, "%s comm %p rank %d nranks %d cudaDev %d nvmlDev %d busId 0 commId 0x%llx - Init COMPLETE",
           job->api, (void *)comm, job->rank, job->nranks, st->dev, st->dev,
           (unsigned long long)job->log_id);
  return job_end(job, ncclSuccess);
}

/* True when the job is done. */
static bool job_poll(struct sim_job *job) {
  static enum sim_job_step (*const steps[])(struct sim_job *) = {job_post, job_exchange, job_join,
                                                                 job_wait};
  if (job->step == STEP_DONE) return true;
  int dead = job->parent ? sim_comm_dead(job->parent) : 0;
  if (!dead && job->comm) dead = sim_comm_dead(job->comm);
  if (dead) {
    job->step = job_end(job, (ncclResult_t)dead);
    return true;
  }
  enum sim_job_step before;
  do {
    before = job->step;
    job->step = steps[before](job);
  } while (job->step != before && job->step != STEP_DONE);
  return job->step == STEP_DONE;
}

static void job_hold(struct sim_job *job, int by) {
  if (job->comm) job->comm->sim->inuse += by;
  if (job->parent) job->parent->sim->inuse += by;
}

/* Publishes the outcome. A communicator whose pointer was given out at the call
 * stays: abort or destroy frees it. */
static ncclResult_t job_finish(struct sim_job *job) {
  ncclResult_t rc = job->result;
  struct ncclComm *comm = job->comm;
  bool given = job->kind == JOB_JOIN && !job->parent;
  job_hold(job, -1);
  if (comm) {
    if (rc == ncclSuccess && comm->sim->ready) {
      if (!given) *job->out = comm;
      atomic_store(&comm->asyncResult, ncclSuccess);
    } else if (given && (job->nonblocking || comm->sim->dead)) {
      atomic_store(&comm->asyncResult, rc);
    } else {
      if (given) *job->out = NULL;
      sim_comm_free(comm);
    }
  }
  if (job->parent && job->nonblocking && !job->parent->sim->dead)
    atomic_store(&job->parent->asyncResult, rc);
  free(job);
  return rc;
}

static struct sim_shm *job_shm(const struct sim_job *job) {
  if (job->comm && job->comm->sim->shm) return job->comm->sim->shm;
  return job->parent ? job->parent->sim->shm : NULL;
}

ncclResult_t sim_jobs_run(struct sim_job *list) {
  ncclResult_t rc = ncclSuccess;
  bool later = false;
  sim_lock();
  for (struct sim_job *j = list; j; j = j->next) job_hold(j, 1);
  for (;;) {
    struct sim_job *open = NULL;
    for (struct sim_job *j = list; j; j = j->next)
      if (!job_poll(j) && !j->nonblocking && !open) open = j;
    if (!open) break;
    sim_pump();
    sim_wait(job_shm(open), 1000);
  }
  while (list) {
    struct sim_job *job = list;
    list = job->next;
    if (job->step == STEP_DONE) {
      ncclResult_t one = job_finish(job);
      if (rc == ncclSuccess) rc = one;
      continue;
    }
    if (job->parent) atomic_store(&job->parent->asyncResult, ncclInProgress);
    later = later || job->kind != JOB_SPLIT; /* split gives 0: the parent is what to ask */
    job->next = g_pending;
    g_pending = job;
    sim_kick();
  }
  sim_unlock();
  return rc == ncclSuccess && later ? ncclInProgress : rc;
}

bool sim_jobs_poll(void) {
  for (struct sim_job **p = &g_pending; *p;) {
    struct sim_job *job = *p;
    if (job_poll(job)) {
      *p = job->next;
      job_finish(job);
    } else {
      p = &job->next;
    }
  }
  return g_pending != NULL;
}

ncclResult_t sim_job_submit(struct sim_job *job) {
  if (sim_group_depth > 0) return sim_group_add_job(job);
  return sim_jobs_run(job);
}
