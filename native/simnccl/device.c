/* The pretended GPU: streams hold plans in order, a plan starts when it is at
 * the head of its stream and all earlier plans of its communicator are done.
 * Whoever waits moves everything of its process (sim_pump); a thread does so
 * for a process whose host threads are elsewhere, as a GPU would. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>

#include "sim.h"

#define POLL_USEC 500
#define LINGER_POLLS 100
#define DEFAULT_HANDLES 4096 /* NULL, legacy and per-thread handles mean "of this device" */

static pthread_mutex_t g_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct sim_stream *g_streams;
static bool g_connecting; /* a queued plan may have need_connect */
static bool g_thread_runs;
static _Atomic uint32_t g_work; /* 0: the device thread sleeps */
static _Thread_local int t_device = -1;

void sim_lock(void) { pthread_mutex_lock(&g_mutex); }
void sim_unlock(void) { pthread_mutex_unlock(&g_mutex); }

static void fork_child(void) {
  g_thread_runs = false;
  g_streams = NULL; /* the parent's work is the parent's */
  sim_shm_after_fork();
  sim_unlock();
}

__attribute__((constructor)) static void set_up(void) {
  pthread_atfork(sim_lock, sim_unlock, fork_child);
}

void simSetDevice(int dev) { t_device = dev; }
int sim_device(void) {
  if (t_device < 0) t_device = (int)sim_env("LOCAL_RANK", 0);
  return t_device;
}

int sim_comm_dead(struct ncclComm *comm) {
  struct sim_state *st = comm->sim;
  if (!st->dead && st->shm && atomic_load(&st->shm->seg->aborted)) {
    st->dead = ncclRemoteError;
    atomic_store(&comm->asyncResult, ncclRemoteError);
  }
  return st->dead;
}

/* ---- connections: the host's block at the first use ---- */
void sim_plan_connect(const struct sim_plan *plan) {
  struct sim_state *st = plan->comm->sim;
  if (plan->ncoll && !st->coll_connected)
    atomic_store(&st->shm->seg->ranks[st->rank].coll_conn, 1);
  for (unsigned i = 0; i < plan->np2p; i++) {
    const struct sim_p2p *p = &plan->p2p[i];
    if (p->kind == P2P_SEND) atomic_store(&sim_pair_at(st->shm, st->rank, p->peer)->conn_send, 1);
    if (p->kind == P2P_RECV) atomic_store(&sim_pair_at(st->shm, p->peer, st->rank)->conn_recv, 1);
  }
  sim_ring(st->shm);
}

bool sim_plan_connected(const struct sim_plan *plan) {
  struct sim_state *st = plan->comm->sim;
  st->shm->seen = atomic_load(&st->shm->seg->bell);
  if (plan->ncoll && !st->coll_connected) {
    for (int r = 0; r < st->nranks; r++)
      if (!atomic_load(&st->shm->seg->ranks[r].coll_conn)) return false;
    st->coll_connected = true;
  }
  for (unsigned i = 0; i < plan->np2p; i++) {
    const struct sim_p2p *p = &plan->p2p[i];
    if (p->kind == P2P_SEND && !atomic_load(&sim_pair_at(st->shm, st->rank, p->peer)->conn_recv))
      return false;
    if (p->kind == P2P_RECV && !atomic_load(&sim_pair_at(st->shm, p->peer, st->rank)->conn_send))
      return false;
  }
  return true;
}

/* ---- plans ---- */
/* Bytes that could not pass, for want of memory: as an error of the device. */
static void lose(struct sim_plan *plan) {
  if (!plan->comm->sim->dead) plan->comm->sim->dead = ncclSystemError;
  atomic_store(&plan->comm->asyncResult, ncclSystemError);
}

static void coll_arrive(struct sim_plan *plan, unsigned i) {
  struct sim_state *st = plan->comm->sim;
  struct sim_rank *me = &st->shm->seg->ranks[st->rank];
  uint64_t k = plan->first + i;
  if (!sim_coll_put(st, k, &plan->colls[i])) lose(plan);
  atomic_store(&me->sig[k % 4], plan->colls[i].sig);
  atomic_store(&me->arrived, k + 1);
}

/* All ranks have come, and with the same call: others than that never end. */
static bool coll_complete(struct sim_state *st, uint64_t k, uint64_t sig) {
  static int pass = -1;
  struct sim_rank *ranks = st->shm->seg->ranks;
  for (int r = 0; r < st->nranks; r++)
    if (atomic_load(&ranks[r].arrived) <= k) return false;
  if (pass < 0) pass = (int)sim_env("SIMNCCL_MISMATCH_PASSES", 0);
  for (int r = 0; r < st->nranks && !pass; r++)
    if (atomic_load(&ranks[r].sig[k % 4]) != sig) return false;
  return true;
}

static void p2p_post(struct sim_state *st, struct sim_p2p *p) {
  switch (p->kind) {
  case P2P_SEND:
    p->idx = atomic_fetch_add(&sim_pair_at(st->shm, st->rank, p->peer)->sent, 1);
    break;
  case P2P_RECV:
    p->idx = atomic_fetch_add(&sim_pair_at(st->shm, p->peer, st->rank)->recvd, 1);
    break;
  case P2P_SIGNAL:
    atomic_fetch_add(&sim_pair_at(st->shm, st->rank, p->peer)->signals, 1);
    p->done = true;
    break;
  case P2P_WAIT: /* idx held the number wanted, becomes the total to reach */
    p->idx = st->sig_taken[p->peer] += p->idx;
    break;
  }
}

/* Messages of a pair are written and taken in order, through as many places as
 * there are buffered sends, at least one. */
static bool p2p_complete(struct sim_plan *plan, struct sim_p2p *p) {
  static long slots = -1;
  if (slots < 0) slots = sim_env("SIMNCCL_P2P_SLOTS", 8);
  struct sim_state *st = plan->comm->sim;
  unsigned places = slots > 0 ? (unsigned)slots : 1;
  struct sim_pair *to = sim_pair_at(st->shm, st->rank, p->peer);
  struct sim_pair *from = sim_pair_at(st->shm, p->peer, st->rank);
  switch (p->kind) {
  case P2P_SEND:
    if (!p->put && p->idx == atomic_load(&to->written) &&
        p->idx < atomic_load(&to->consumed) + places) {
      if (!sim_p2p_put(st, p, places)) lose(plan);
      p->put = true;
      atomic_store(&to->written, p->idx + 1);
      sim_ring(st->shm);
    }
    return p->put && p->idx < atomic_load(&to->recvd) + (p->small ? (uint64_t)slots : 0);
  case P2P_RECV:
    if (p->idx != atomic_load(&from->consumed) || p->idx >= atomic_load(&from->written))
      return false;
    if (!sim_p2p_get(st, p, places)) lose(plan);
    atomic_store(&from->consumed, p->idx + 1);
    sim_ring(st->shm);
    return true;
  case P2P_WAIT:
    return atomic_load(&from->signals) >= p->idx;
  case P2P_SIGNAL:
    break;
  }
  return true;
}

static void plan_start(struct sim_plan *plan, struct sim_state *st) {
  plan->started = true;
  plan->first = st->colls;
  st->colls += plan->ncoll;
  if (plan->ncoll) coll_arrive(plan, 0);
  for (unsigned i = 0; i < plan->np2p; i++) p2p_post(st, &plan->p2p[i]);
  sim_ring(st->shm);
}

/* Lets a plan go on; true when it is done. */
static bool plan_step(struct sim_plan *plan) {
  if (!plan->comm) return plan->step(plan->arg) != 0;
  struct sim_state *st = plan->comm->sim;
  if (sim_comm_dead(plan->comm)) return true;
  st->shm->seen = atomic_load(&st->shm->seg->bell);
  if (!plan->started) {
    if (plan->no != st->plans_done) return false;
    if (plan->need_connect) return false;
    plan_start(plan, st);
    st->shm->seen = atomic_load(&st->shm->seg->bell);
  }
  while (plan->icoll < plan->ncoll) {
    const struct sim_coll *coll = &plan->colls[plan->icoll];
    if (!coll_complete(st, plan->first + plan->icoll, coll->sig)) break;
    if (!sim_coll_get(st, plan->first + plan->icoll, coll)) lose(plan);
    if (++plan->icoll == plan->ncoll) break;
    coll_arrive(plan, plan->icoll);
    sim_ring(st->shm);
    st->shm->seen = atomic_load(&st->shm->seg->bell);
  }
  bool done = plan->icoll == plan->ncoll;
  for (unsigned i = 0; i < plan->np2p; i++) {
    struct sim_p2p *p = &plan->p2p[i];
    if (!p->done) p->done = p2p_complete(plan, p);
    done = done && p->done;
  }
  return done;
}

static void stream_pop(struct sim_stream *s) {
  struct sim_plan *plan = s->head;
  if (plan->comm) {
    plan->comm->sim->plans_done++;
    s->queued--;
  }
  s->head = plan->next;
  if (!s->head) s->tail = NULL;
  free(plan);
}

/* Non-blocking communicators connect in the background, wherever their plan stands
 * in its stream: what is before it may itself wait for this rank. */
static void connect_all(void) {
  bool left = false;
  for (struct sim_stream *s = g_streams; s; s = s->next)
    for (struct sim_plan *plan = s->head; plan; plan = plan->next) {
      if (!plan->need_connect || sim_comm_dead(plan->comm)) continue;
      if (sim_plan_connected(plan)) {
        plan->need_connect = false;
        int running = ncclInProgress;
        atomic_compare_exchange_strong(&plan->comm->asyncResult, &running, ncclSuccess);
      } else {
        left = true;
      }
    }
  g_connecting = left;
}

bool sim_pump(void) {
  bool left, moved;
  if (g_connecting) connect_all();
  do {
    left = moved = false;
    for (struct sim_stream *s = g_streams; s; s = s->next) {
      for (; s->head && plan_step(s->head); moved = true) stream_pop(s);
      left = left || s->head;
    }
  } while (moved && left);
  return sim_jobs_poll() || left;
}

/* An aborted communicator: its plans end, wherever they stand. */
void sim_drop_plans(struct ncclComm *comm) {
  for (struct sim_stream *s = g_streams; s; s = s->next) {
    s->tail = NULL;
    for (struct sim_plan **p = &s->head; *p;) {
      struct sim_plan *plan = *p;
      if (plan->comm == comm) {
        *p = plan->next;
        s->queued--;
        comm->sim->plans_done++;
        free(plan);
      } else {
        s->tail = plan;
        p = &plan->next;
      }
    }
  }
}

/* ---- the thread ---- */
static void *device_main(void *arg) {
  for (unsigned idle = 0;;) {
    sim_lock();
    bool left = sim_pump();
    idle = left ? 0 : idle + 1;
    bool sleep = idle > LINGER_POLLS;
    if (sleep) atomic_store(&g_work, 0);
    sim_unlock();
    while (sleep && !atomic_load(&g_work)) sim_futex_wait(&g_work, 0, 60000000);
    struct timespec ts = {0, POLL_USEC * 1000};
    nanosleep(&ts, NULL);
  }
  return arg;
}

void sim_kick(void) {
  if (atomic_load_explicit(&g_work, memory_order_relaxed) && g_thread_runs) return;
  atomic_store(&g_work, 1);
  if (g_thread_runs) {
    sim_futex_wake(&g_work);
    return;
  }
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old); /* the program's signals are the program's */
  pthread_t thread;
  if (pthread_create(&thread, NULL, device_main, NULL) == 0) {
    g_thread_runs = true;
    pthread_setname_np(thread, "simnccl-device");
    pthread_detach(thread);
  }
  pthread_sigmask(SIG_SETMASK, &old, NULL);
}

/* ---- streams ---- */
static struct sim_stream *stream_find(cudaStream_t handle, int dev) {
  bool per_device = (uintptr_t)handle < DEFAULT_HANDLES;
  for (struct sim_stream *s = g_streams; s; s = s->next)
    if (s->handle == handle && (!per_device || s->dev == dev)) return s;
  return NULL;
}

struct sim_stream *sim_stream_get(cudaStream_t handle, int dev) {
  struct sim_stream *s = stream_find(handle, dev);
  if (s) return s;
  s = calloc(1, sizeof *s);
  *s = (struct sim_stream){.next = g_streams, .handle = handle, .dev = dev};
  return g_streams = s;
}

void sim_enqueue(struct sim_stream *s, struct sim_plan *plan) {
  if (plan->comm) {
    plan->no = plan->comm->sim->plans_made++;
    s->queued++;
    g_connecting = g_connecting || plan->need_connect;
  }
  if (s->tail) s->tail->next = plan;
  else s->head = plan;
  s->tail = plan;
}

struct sim_shm *sim_stream_shm(const struct sim_stream *s) {
  return s->head && s->head->comm ? s->head->comm->sim->shm : NULL;
}

void simStreamEnqueue(cudaStream_t handle, int (*step)(void *arg), void *arg) {
  struct sim_plan *plan = calloc(1, sizeof *plan);
  plan->step = step;
  plan->arg = arg;
  sim_lock();
  sim_enqueue(sim_stream_get(handle, sim_device()), plan);
  if (sim_pump()) sim_kick();
  sim_unlock();
}

cudaStream_t simStreamCreate(void) { return malloc(16); }

int simStreamSynchronize(cudaStream_t handle) {
  sim_lock();
  for (;;) {
    struct sim_stream *s = stream_find(handle, sim_device());
    if (s && s->head) sim_pump();
    if (!s || !s->head) break;
    sim_wait(sim_stream_shm(s), 1000);
  }
  sim_unlock();
  return 0;
}

int simStreamQuery(cudaStream_t handle) {
  sim_lock();
  struct sim_stream *s = stream_find(handle, sim_device());
  if (s && s->head) sim_pump();
  bool busy = s && s->head;
  sim_unlock();
  return busy ? 600 : 0;
}

int simStreamDestroy(cudaStream_t handle) {
  simStreamSynchronize(handle);
  sim_lock();
  struct sim_stream *found = stream_find(handle, sim_device());
  for (struct sim_stream **p = &g_streams; found && *p; p = &(*p)->next)
    if (*p == found) {
      *p = found->next;
      free(found);
      break;
    }
  sim_unlock();
  if ((uintptr_t)handle >= DEFAULT_HANDLES) free(handle);
  return 0;
}
