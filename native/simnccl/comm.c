/* Communicators: made, made from others, ended. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "ncp_hash.h"
#include "sim.h"

static const unsigned char *id_bytes(const ncclUniqueId *id) {
  return (const unsigned char *)id->internal;
}

static uint64_t id_hash(const ncclUniqueId *id) {
#if SIM_VERSION_CODE >= 22600
  return ncp_hash_226(id_bytes(id));
#else
  return ncp_hash_djb2a(id_bytes(id));
#endif
}

/* What the log calls commId: up to 2.25 not the communicator's hash. */
static uint64_t id_log(const ncclUniqueId *id) {
#if SIM_VERSION_CODE >= 22600
  return id_hash(id);
#else
  return ncp_hash_uniqueid(id_bytes(id));
#endif
}

static uint64_t child_hash(uint64_t parent, unsigned count, int color) {
#if SIM_VERSION_CODE >= 22600
  return ncp_hash_226_child(parent, count, (ncp_u32)color);
#else
  char text[NCP_UNIQUE_ID_BYTES] = {0};
#if SIM_VERSION_CODE >= 22400
  snprintf(text, sizeof text, "%016lx-%u-%d", (unsigned long)parent, count, color);
#else
  (void)count;
  snprintf(text, sizeof text, "%016lx-%d", (unsigned long)parent, color);
#endif
  return ncp_hash_djb2a((const unsigned char *)text);
#endif
}

static uint64_t own_hash(const struct ncclComm *comm) {
#if SIM_VERSION_CODE >= 21800
  return comm->commHash;
#else
  return comm->magic;
#endif
}

/* simnccl's own key of a child's segment; NCCL's hash would not be unique. */
static uint64_t child_key(const struct ncclComm *parent, unsigned kind, unsigned n, unsigned extra) {
  return ncp_hash_226_child(ncp_hash_226_child(parent->sim->key, kind, n), extra, kind);
}

SIM_API(ncclResult_t, ncclGetUniqueId, ncclUniqueId *out) {
  static _Atomic int swept;
  if (!out) return sim_fail(ncclInvalidArgument, "GetUniqueId: NULL");
  if (!atomic_exchange(&swept, 1)) simCleanup();
  memset(out, 0, sizeof *out);
  struct { /* a random magic and a socket address, as NCCL's */
    uint64_t magic;
    uint16_t family, port;
    uint8_t addr[4];
  } head = {0, 2, 0, {127, 0, 0, 1}};
  if (getrandom(&head.magic, sizeof head.magic, 0) != sizeof head.magic) return ncclSystemError;
  head.port = (uint16_t)(head.magic >> 24);
  memcpy(out->internal, &head, sizeof head);
  return ncclSuccess;
}

static ncclResult_t check_config(const ncclConfig_t *config) {
  if (config && config->magic != NCCL_CONFIG_MAGIC)
    return sim_fail(ncclInvalidArgument, "config not set by NCCL_CONFIG_INITIALIZER");
  return ncclSuccess;
}

static struct sim_job *job_new(enum sim_job_kind kind, const char *api, const ncclConfig_t *config,
                               struct ncclComm *parent, ncclComm_t *out) {
  struct sim_job *job = calloc(1, sizeof *job);
  job->kind = kind;
  job->api = api;
  job->parent = parent;
  job->out = out;
  job->comm = sim_comm_new(config ? config : parent ? &parent->config : NULL);
  job->nonblocking = job->comm->sim->nonblocking;
  return job;
}

static ncclResult_t init_rank(const char *api, ncclComm_t *out, int nranks, const ncclUniqueId *id,
                              int rank, const ncclConfig_t *config, int dev,
                              struct sim_job **gather) {
  if (!out || !id || nranks < 1 || rank < 0 || rank >= nranks)
    return sim_fail(ncclInvalidArgument, "%s: invalid rank requested : %d/%d", api, rank, nranks);
  ncclResult_t rc = check_config(config);
  if (rc != ncclSuccess) return rc;
  struct sim_job *job = job_new(JOB_JOIN, api, config, NULL, out);
  job->comm->sim->dev = dev;
  job->key = ncp_hash_226(id_bytes(id));
  job->hash = id_hash(id);
  job->log_id = id_log(id);
  memcpy(&job->magic, id->internal, sizeof job->magic);
  job->nranks = nranks;
  job->rank = rank;
  *out = job->comm; /* before anybody is met, as NCCL does */
  if (gather) {
    job->next = *gather;
    *gather = job;
    return ncclSuccess;
  }
  return sim_job_submit(job);
}

SIM_API(ncclResult_t, ncclCommInitRank, ncclComm_t *comm, int nranks, ncclUniqueId commId,
        int rank) {
  return sim_group_error(
      init_rank("ncclCommInitRank", comm, nranks, &commId, rank, NULL, sim_device(), NULL));
}

SIM_API(ncclResult_t, ncclCommInitRankConfig, ncclComm_t *comm, int nranks, ncclUniqueId commId,
        int rank, ncclConfig_t *config) {
  return sim_group_error(init_rank("ncclCommInitRankConfig", comm, nranks, &commId, rank, config,
                                   sim_device(), NULL));
}

SIM_API(ncclResult_t, ncclCommInitRankScalable, ncclComm_t *newcomm, int nranks, int myrank,
        int nId, ncclUniqueId *commIds, ncclConfig_t *config) {
  if (nId < 1) return sim_group_error(sim_fail(ncclInvalidArgument, "nId %d", nId));
  return sim_group_error(init_rank("ncclCommInitRankScalable", newcomm, nranks, commIds, myrank,
                                   config, sim_device(), NULL));
}

SIM_API(ncclResult_t, ncclCommInitAll, ncclComm_t *comms, int ndev, const int *devlist) {
  if (!comms || ndev < 1) return sim_fail(ncclInvalidArgument, "InitAll: %d devices", ndev);
  ncclUniqueId id;
  ncclResult_t rc = ncclGetUniqueId(&id);
  struct sim_job *jobs = NULL;
  for (int i = ndev - 1; i >= 0 && rc == ncclSuccess; i--)
    rc = init_rank("ncclCommInitAll", &comms[i], ndev, &id, i, NULL, devlist ? devlist[i] : i, &jobs);
  if (rc != ncclSuccess) return sim_group_error(rc);
  if (sim_group_depth == 0) return sim_jobs_run(jobs);
  while (jobs) {
    struct sim_job *job = jobs;
    jobs = job->next;
    job->next = NULL;
    sim_group_add_job(job);
  }
  return ncclSuccess;
}

static ncclResult_t split(ncclComm_t comm, int color, int key, ncclComm_t *out,
                          const ncclConfig_t *config) {
  if (!comm) return sim_fail(ncclUnhandledCudaError, "CommSplit: NULL communicator");
  ncclResult_t rc = sim_check_ready(comm);
  if (rc == ncclSuccess) rc = check_config(config);
  if (rc != ncclSuccess) return rc;
  if (!out || color < NCCL_SPLIT_NOCOLOR) return sim_fail(ncclInvalidArgument, "color %d", color);
  *out = NULL;
  struct sim_job *job = job_new(JOB_SPLIT, "ncclCommSplit", config, comm, out);
  if (color < 0) {
    sim_comm_free(job->comm);
    job->comm = NULL;
  } else {
    job->comm->sim->dev = comm->sim->dev;
  }
  sim_lock();
  job->gen = ++comm->sim->xmade;
  job->count = ++comm->sim->children;
  sim_unlock();
  job->color = color;
  job->order = key;
  job->hash = job->magic = job->log_id = child_hash(own_hash(comm), job->count, color);
  job->key = child_key(comm, 1, (unsigned)job->gen, (unsigned)color);
  return sim_job_submit(job);
}

SIM_API(ncclResult_t, ncclCommSplit, ncclComm_t comm, int color, int key, ncclComm_t *newcomm,
        ncclConfig_t *config) {
  return sim_group_error(split(comm, color, key, newcomm, config));
}

static ncclResult_t shrink(ncclComm_t comm, const int *list, int n, ncclComm_t *out,
                           const ncclConfig_t *config) {
  ncclResult_t rc = sim_check_ready(comm);
  if (rc == ncclSuccess) rc = check_config(config);
  if (rc != ncclSuccess) return rc;
  struct sim_state *ps = comm->sim;
  if (!out || !list || n < 1 || n >= ps->nranks) return sim_fail(ncclInvalidArgument, "Shrink: %d", n);
  int rank = ps->rank;
  unsigned members = 0;
  for (int i = 0; i < n; i++) {
    if (list[i] < 0 || list[i] >= ps->nranks || list[i] == ps->rank)
      return sim_fail(ncclInvalidArgument, "Shrink: excluded rank %d", list[i]);
    rank -= list[i] < ps->rank;
    members += 1U << (list[i] % 31);
  }
  *out = NULL;
  struct sim_job *job = job_new(JOB_JOIN, "ncclCommShrink", config, comm, out);
  job->comm->sim->dev = ps->dev;
  job->nranks = ps->nranks - n;
  job->rank = rank;
  job->hash = job->magic = job->log_id = child_hash(own_hash(comm), 0, 0);
  sim_lock();
  job->key = child_key(comm, 2, ++ps->shrinks, members);
  sim_unlock();
  return sim_job_submit(job);
}

SIM_API(ncclResult_t, ncclCommShrink, ncclComm_t comm, int *excludeRanksList,
        int excludeRanksCount, ncclComm_t *newcomm, ncclConfig_t *config, int shrinkFlags) {
  (void)shrinkFlags;
  return sim_group_error(shrink(comm, excludeRanksList, excludeRanksCount, newcomm, config));
}

/* The id of the n-th growth is a function of the parent, so old ranks need not be told. */
static void grow_id(struct ncclComm *comm, unsigned n, ncclUniqueId *out) {
  memset(out, 0, sizeof *out);
  uint64_t words[2] = {ncp_hash_226_child(comm->magic, n, 0), child_key(comm, 3, n, 0)};
  memcpy(out->internal, words, sizeof words);
}

SIM_API(ncclResult_t, ncclCommGetUniqueId, ncclComm_t comm, ncclUniqueId *uniqueId) {
  ncclResult_t rc = sim_check_ready(comm);
  if (rc != ncclSuccess || !uniqueId) return rc != ncclSuccess ? rc : ncclInvalidArgument;
  grow_id(comm, comm->sim->grows + 1, uniqueId);
  return ncclSuccess;
}

SIM_API(ncclResult_t, ncclCommGrow, ncclComm_t comm, int nRanks, const ncclUniqueId *uniqueId,
        int rank, ncclComm_t *newcomm, ncclConfig_t *config) {
  ncclUniqueId id;
  int dev = sim_device();
  if (comm) {
    ncclResult_t rc = sim_check_ready(comm);
    if (rc == ncclSuccess && (rank != -1 || nRanks <= comm->sim->nranks))
      rc = sim_fail(ncclInvalidArgument, "Grow: rank %d, %d ranks", rank, nRanks);
    if (rc != ncclSuccess) return sim_group_error(rc);
    grow_id(comm, ++comm->sim->grows, &id);
    rank = comm->sim->rank;
    dev = comm->sim->dev;
  } else if (uniqueId) {
    id = *uniqueId;
  } else {
    return sim_group_error(sim_fail(ncclInvalidArgument, "Grow: neither communicator nor id"));
  }
  return sim_group_error(init_rank("ncclCommGrow", newcomm, nRanks, &id, rank, config, dev, NULL));
}

/* ---- the end ---- */
static bool idle(const struct ncclComm *comm) {
  return comm->sim->dead || comm->sim->plans_done == comm->sim->plans_made;
}

static void wait_idle(struct ncclComm *comm) {
  for (;;) {
    sim_pump();
    sim_comm_dead(comm);
    if (idle(comm)) break;
    sim_wait(comm->sim->shm, 1000);
  }
}

/* Ends what is under way in this process and waits until no thread is inside. */
static void cancel(struct ncclComm *comm, ncclResult_t error) {
  struct sim_state *st = comm->sim;
  if (!st->dead) st->dead = error;
  atomic_store(&comm->asyncResult, error);
  sim_drop_plans(comm);
  if (st->shm) sim_ring(st->shm);
  sim_jobs_poll();
  while (st->inuse && st->shm) sim_wait(st->shm, 1000);
}

SIM_API(ncclResult_t, ncclCommFinalize, ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  ncclResult_t rc = sim_check_ready(comm);
  if (rc != ncclSuccess) return sim_group_error(rc);
  sim_lock();
  wait_idle(comm);
  rc = (ncclResult_t)comm->sim->dead;
  sim_unlock();
  return rc;
}

SIM_API(ncclResult_t, ncclCommDestroy, ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  ncclResult_t rc = sim_check(comm);
  if (rc != ncclSuccess) return sim_group_error(rc);
  sim_lock();
  if (comm->sim->ready) wait_idle(comm);
  cancel(comm, ncclSystemError);
  sim_comm_free(comm);
  sim_unlock();
  return ncclSuccess;
}

/* Peers learn of it (ncclRemoteError), unless SIMNCCL_ABORT_LOCAL=1 asks for
 * what NVLink peers see: nothing. */
SIM_API(ncclResult_t, ncclCommAbort, ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  ncclResult_t rc = sim_check(comm);
  if (rc != ncclSuccess) return sim_group_error(rc);
  sim_lock();
  comm->sim->dead = ncclSystemError;
  if (comm->sim->shm && !sim_env("SIMNCCL_ABORT_LOCAL", 0)) atomic_store(&comm->sim->shm->seg->aborted, 1);
  cancel(comm, ncclSystemError);
  sim_comm_free(comm);
  sim_unlock();
  return ncclSuccess;
}

SIM_API(ncclResult_t, ncclCommRevoke, ncclComm_t comm, int revokeFlags) {
  (void)revokeFlags;
  if (!comm) return ncclSuccess;
  ncclResult_t rc = sim_check(comm);
  if (rc != ncclSuccess) return sim_group_error(rc);
  sim_lock();
  cancel(comm, ncclInvalidUsage);
  sim_unlock();
  return ncclSuccess;
}
