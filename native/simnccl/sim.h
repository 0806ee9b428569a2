/* simnccl's inside. Nothing here is visible to programs.
 *
 * shm.c     the segment that joins the ranks of one communicator
 * device.c  streams, plans and the thread that plays the GPU
 * data.c    the bytes, when a driver stand-in has told which memory is the device's
 * job.c     init, split, shrink, grow, window registration as pollable jobs
 * group.c   groups and the commit of calls
 * comm.c, coll.c, p2p.c, misc.c   the exported functions */
#ifndef SIM_H
#define SIM_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "simnccl.h"

#ifndef SIM_VERSION
#define SIM_VERSION "2.28.9"
#define SIM_VERSION_CODE 22809
#endif

/* ncclX weak and pncclX strong at one address, as in the real library. */
#define SIM_API(ret, name, ...) \
  __attribute__((visibility("default"))) ret p##name(__VA_ARGS__); \
  __attribute__((visibility("default"), weak, alias("p" #name))) ret name(__VA_ARGS__); \
  ret p##name(__VA_ARGS__)

#define SIM_MAGIC 0x0280028002800280ULL

/* Where rank lies in the real struct, roughly: a tool must not rely on it. */
#if SIM_VERSION_CODE >= 22700
#define SIM_FILLER 1066240
#elif SIM_VERSION_CODE >= 22200
#define SIM_FILLER 492800
#else
#define SIM_FILLER 13600
#endif

/* The functions that NCCL counts, in NCCL's order, then those it does not. */
enum sim_fn {
  FN_BROADCAST, FN_REDUCE, FN_ALLGATHER, FN_REDUCESCATTER, FN_ALLREDUCE, FN_COUNTED,
  FN_ALLTOALL = FN_COUNTED, FN_GATHER, FN_SCATTER,
};

struct sim_state;

/* Field names as in NCCL, so that a debugger's reader works on both. */
struct ncclComm {
#if SIM_VERSION_CODE >= 22100
  uint64_t startMagic;
#endif
  char simFiller[SIM_FILLER];
  uint64_t magic;
#if SIM_VERSION_CODE >= 21800
  uint64_t commHash;
#endif
  int rank, nRanks, cudaDev, node, nNodes, localRank;
  uint64_t simPad[8];
  uint64_t opCount;
  uint64_t simPad2[64];
  _Atomic(int) asyncResult;
  uint64_t simPad3[128];
#if SIM_VERSION_CODE >= 22300
  _Atomic uint64_t seqNumber[FN_COUNTED];
#endif
  ncclConfig_t config;
  struct sim_state *sim;
#if SIM_VERSION_CODE >= 22100
  uint64_t endMagic;
#endif
};

/* ---- shm.c: shared between processes; atomics only ---- */
struct sim_rank {
  _Atomic uint32_t joined, coll_conn;
  _Atomic uint64_t arrived;  /* collectives this rank's device has reached */
  _Atomic uint64_t sig[4];   /* signature of collective k at k % 4 */
  _Atomic uint64_t xgen;     /* host exchanges entered (split, window) */
  _Atomic uint64_t xval[2];  /* value of exchange g at g % 2 */
};
struct sim_pair { /* from a source to a destination */
  _Atomic uint64_t sent, recvd, signals;
  _Atomic uint64_t written, consumed; /* messages whose bytes are there, and were taken */
  _Atomic uint32_t conn_send, conn_recv;
};
struct sim_seg {
  _Atomic uint32_t nranks, joined, aborted, bell, waiters, pad;
  struct sim_rank ranks[]; /* nranks, then nranks * nranks pairs */
};
struct sim_shm {
  struct sim_seg *seg;
  struct sim_pair *pairs;
  size_t size;
  int fd, nranks, rank, refs;
  int data_fd; /* where the bytes pass: fd, or memory of its own for one rank */
  uint32_t seen; /* bell at the last evaluation */
  bool conflict, left;
  char name[48];
  struct sim_shm *next;
};
ncclResult_t sim_shm_join(uint64_t key, int nranks, int rank, struct sim_shm **out);
void sim_shm_leave(struct sim_shm *shm);
void sim_shm_unref(struct sim_shm *shm);
void sim_ring(struct sim_shm *shm);
/* Holding the lock: waits outside it for the bell (or usec), then takes it again. */
void sim_wait(struct sim_shm *shm, unsigned usec);
void sim_futex_wait(_Atomic uint32_t *word, uint32_t seen, unsigned usec);
void sim_futex_wake(_Atomic uint32_t *word);
void sim_shm_after_fork(void);
int sim_shm_data(struct sim_shm *shm); /* descriptor for the bytes, or -1 */
static inline struct sim_pair *sim_pair_at(struct sim_shm *s, int src, int dst) {
  return &s->pairs[(size_t)src * (size_t)s->nranks + (size_t)dst];
}

/* ---- per-communicator state of this process; under the lock ---- */
struct sim_state {
  struct sim_shm *shm;
  uint64_t key;
  int rank, nranks, dev;
  int dead;  /* 0, or the error that every later call gets */
  int inuse; /* threads waiting inside a call */
  bool ready, nonblocking, suspended, coll_connected;
  uint64_t colls;                 /* collectives started here */
  uint64_t plans_made, plans_done;
  uint64_t xmade, xdone;          /* host exchanges */
  unsigned children, shrinks, grows;
  _Atomic unsigned redops;
  uint64_t *sig_taken;            /* signals consumed, per peer */
};

/* ---- device.c ---- */
enum sim_p2p_kind { P2P_SEND, P2P_RECV, P2P_SIGNAL, P2P_WAIT };
struct sim_p2p {
  enum sim_p2p_kind kind;
  int peer;
  bool small, done, put;
  uint64_t idx;
  void *buff;
  size_t bytes;
};
struct sim_coll {
  uint64_t sig;
  int fn, type, op, root;
  size_t count;
  const void *send;
  void *recv;
};
struct sim_plan {
  struct sim_plan *next;
  struct ncclComm *comm;    /* NULL: not NCCL's but a step of the driver stand-in */
  int (*step)(void *arg);   /* then: not 0 when it is done */
  void *arg;
  uint64_t no;
  bool started, need_connect;
  unsigned ncoll, icoll, np2p;
  uint64_t first; /* number of its first collective on the communicator */
  struct sim_coll *colls;
  struct sim_p2p *p2p;
};
struct sim_stream {
  struct sim_stream *next;
  cudaStream_t handle;
  int dev;
  unsigned queued;
  struct sim_plan *head, *tail;
};
void sim_lock(void);
void sim_unlock(void);
bool sim_pump(void); /* lets everything of this process move; true if something is left */
void sim_kick(void); /* something is left: the device thread must run */
struct sim_stream *sim_stream_get(cudaStream_t handle, int dev);
void sim_enqueue(struct sim_stream *stream, struct sim_plan *plan);
struct sim_shm *sim_stream_shm(const struct sim_stream *stream); /* of its head; may be NULL */
void sim_drop_plans(struct ncclComm *comm);
bool sim_plan_connected(const struct sim_plan *plan);
void sim_plan_connect(const struct sim_plan *plan);
int sim_comm_dead(struct ncclComm *comm); /* also notices an abort elsewhere */
int sim_device(void);

/* ---- data.c; all but sim_copy with the lock held ---- */
bool sim_data_on(void); /* a driver stand-in is there */
bool sim_coll_put(struct sim_state *st, uint64_t k, const struct sim_coll *c);
bool sim_coll_get(struct sim_state *st, uint64_t k, const struct sim_coll *c);
bool sim_p2p_put(struct sim_state *st, const struct sim_p2p *p, unsigned slots);
bool sim_p2p_get(struct sim_state *st, const struct sim_p2p *p, unsigned slots);
void sim_copy(cudaStream_t stream, void *to, const void *from, size_t bytes); /* one rank */

/* ---- job.c ---- */
enum sim_job_kind { JOB_JOIN, JOB_SPLIT, JOB_BARRIER };
enum sim_job_step { STEP_POST, STEP_EXCHANGE, STEP_JOIN, STEP_WAIT, STEP_DONE };
struct sim_job {
  struct sim_job *next;
  enum sim_job_kind kind;
  enum sim_job_step step;
  const char *api;
  struct ncclComm *comm;   /* the new one; NULL for a barrier */
  struct ncclComm *parent; /* of a child; the subject of a barrier */
  ncclComm_t *out;
  uint64_t key, hash, log_id, magic, gen;
  int nranks, rank, color, order;
  unsigned count;
  bool nonblocking;
  ncclResult_t result;
};
ncclResult_t sim_jobs_run(struct sim_job *list); /* consumes; in group: queued */
bool sim_jobs_poll(void);                        /* pending non-blocking jobs; true if any */
ncclResult_t sim_job_submit(struct sim_job *job);
struct ncclComm *sim_comm_new(const ncclConfig_t *config);
void sim_comm_free(struct ncclComm *comm);

/* ---- group.c ---- */
struct sim_call {
  struct ncclComm *comm;
  cudaStream_t stream;
  int fn; /* enum sim_fn, or -1 for point-to-point */
  struct sim_coll coll;
  struct sim_p2p p2p;
};
extern _Thread_local int sim_group_depth;
ncclResult_t sim_submit(const struct sim_call *calls, size_t n);
ncclResult_t sim_group_add_job(struct sim_job *job);
ncclResult_t sim_group_error(ncclResult_t rc); /* remembers it for GroupEnd */

/* ---- checks and small things (misc.c) ---- */
ncclResult_t sim_check(struct ncclComm *comm);       /* pointer and magic */
ncclResult_t sim_check_ready(struct ncclComm *comm); /* also finished init and alive */
ncclResult_t sim_fail(ncclResult_t rc, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
void sim_info(struct ncclComm *comm, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
long sim_env(const char *name, long fallback);
size_t sim_type_size(ncclDataType_t t);

#endif
