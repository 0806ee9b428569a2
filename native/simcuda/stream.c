/* Streams and events. Where simnccl is loaded, its queues are the streams: steps
 * of both stand in one order. Without it nothing can wait, and steps run at once. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "simcuda.h"

int simcudaHolds(const void *pointer, size_t size);

static struct {
  void (*enqueue)(void *stream, sim_step step, void *arg);
  int (*synchronize)(void *stream), (*query)(void *stream), (*destroy)(void *stream);
  void (*set_device)(int device);
  void (*set_memory)(int (*holds)(const void *pointer, size_t size));
} g_nccl;
static _Atomic bool g_linked;
static pthread_mutex_t g_link_mutex = PTHREAD_MUTEX_INITIALIZER;

/* By name, and only what is loaded already: NCCL itself has none of these functions. */
void sim_link(void) {
  if (atomic_load(&g_linked)) return;
  void *lib = dlopen("libnccl.so.2", RTLD_NOLOAD | RTLD_LAZY);
  if (!lib) return;
  pthread_mutex_lock(&g_link_mutex);
  *(void **)&g_nccl.enqueue = dlsym(lib, "simStreamEnqueue");
  *(void **)&g_nccl.synchronize = dlsym(lib, "simStreamSynchronize");
  *(void **)&g_nccl.query = dlsym(lib, "simStreamQuery");
  *(void **)&g_nccl.destroy = dlsym(lib, "simStreamDestroy");
  *(void **)&g_nccl.set_device = dlsym(lib, "simSetDevice");
  *(void **)&g_nccl.set_memory = dlsym(lib, "simSetMemory");
  if (g_nccl.enqueue && g_nccl.synchronize && g_nccl.query && g_nccl.destroy &&
      g_nccl.set_device && g_nccl.set_memory) {
    g_nccl.set_memory(simcudaHolds);
    atomic_store(&g_linked, true);
  }
  pthread_mutex_unlock(&g_link_mutex);
}

void sim_link_device(int device) {
  if (atomic_load(&g_linked)) g_nccl.set_device(device);
}

void sim_enqueue(void *stream, sim_step step, void *arg) {
  if (atomic_load(&g_linked)) g_nccl.enqueue(stream, step, arg);
  else step(arg);
}

SIM_CUDA cuStreamCreate(void **stream, unsigned flags) {
  int rc = sim_ready();
  if (rc == CUDA_SUCCESS && (!stream || flags > 1)) rc = CUDA_ERROR_INVALID_VALUE;
  if (rc != CUDA_SUCCESS) return rc;
  sim_link();
  *stream = malloc(16); /* as simStreamCreate's, which simStreamDestroy frees */
  return *stream ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

SIM_CUDA cuStreamDestroy_v2(void *stream) {
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (atomic_load(&g_linked)) g_nccl.destroy(stream);
  else free(stream);
  return sim_ready();
}

SIM_CUDA cuStreamSynchronize(void *stream) {
  int rc = sim_ready();
  if (rc == CUDA_SUCCESS && atomic_load(&g_linked)) g_nccl.synchronize(stream);
  return rc == CUDA_SUCCESS ? sim_ready() : rc;
}

SIM_CUDA cuStreamQuery(void *stream) {
  int rc = sim_ready();
  if (rc == CUDA_SUCCESS && atomic_load(&g_linked)) rc = g_nccl.query(stream);
  return rc == CUDA_SUCCESS ? sim_ready() : rc;
}

/* ---- events ---- */
struct event {
  _Atomic int users;
  _Atomic unsigned recorded, done; /* numbers of recordings asked for and reached */
  _Atomic int64_t time;            /* ns, of the last one reached */
};

struct visit {
  struct event *event;
  unsigned number;
};

static void event_release(struct event *e) {
  if (atomic_fetch_sub(&e->users, 1) == 1) free(e);
}

static int record_step(void *arg) {
  struct visit *v = arg;
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  atomic_store(&v->event->time, (int64_t)now.tv_sec * 1000000000 + now.tv_nsec);
  atomic_store(&v->event->done, v->number);
  event_release(v->event);
  free(v);
  return 1;
}

static int wait_step(void *arg) {
  struct visit *v = arg;
  if (atomic_load(&v->event->done) < v->number) return 0;
  event_release(v->event);
  free(v);
  return 1;
}

static void visit(struct event *e, unsigned number, sim_step step, void *stream) {
  struct visit *v = malloc(sizeof *v);
  *v = (struct visit){e, number};
  atomic_fetch_add(&e->users, 1);
  sim_enqueue(stream, step, v);
}

SIM_CUDA cuEventCreate(void **event, unsigned flags) {
  int rc = sim_ready();
  if (rc == CUDA_SUCCESS && (!event || flags > 7)) rc = CUDA_ERROR_INVALID_VALUE;
  if (rc != CUDA_SUCCESS) return rc;
  struct event *e = calloc(1, sizeof *e);
  if (!e) return CUDA_ERROR_OUT_OF_MEMORY;
  atomic_store(&e->users, 1);
  *event = e;
  return CUDA_SUCCESS;
}

SIM_CUDA cuEventDestroy_v2(void *event) {
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  event_release(event);
  return sim_ready();
}

SIM_CUDA cuEventRecord(void *event, void *stream) {
  int rc = sim_ready();
  if (rc == CUDA_SUCCESS && !event) rc = CUDA_ERROR_INVALID_HANDLE;
  if (rc != CUDA_SUCCESS) return rc;
  struct event *e = event;
  visit(e, atomic_fetch_add(&e->recorded, 1) + 1, record_step, stream);
  return CUDA_SUCCESS;
}

SIM_CUDA cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
  int rc = sim_ready();
  if (rc == CUDA_SUCCESS && !event) rc = CUDA_ERROR_INVALID_HANDLE;
  if (rc == CUDA_SUCCESS && flags > 1) rc = CUDA_ERROR_INVALID_VALUE;
  if (rc != CUDA_SUCCESS) return rc;
  struct event *e = event;
  visit(e, atomic_load(&e->recorded), wait_step, stream);
  return CUDA_SUCCESS;
}

static bool reached(struct event *e) {
  return atomic_load(&e->done) >= atomic_load(&e->recorded);
}

SIM_CUDA cuEventQuery(void *event) {
  int rc = sim_ready();
  if (rc == CUDA_SUCCESS && !event) rc = CUDA_ERROR_INVALID_HANDLE;
  if (rc == CUDA_SUCCESS && !reached(event)) rc = CUDA_ERROR_NOT_READY;
  return rc;
}

SIM_CUDA cuEventElapsedTime(float *milliseconds, void *start, void *end) {
  struct event *from = start, *to = end;
  int rc = sim_ready();
  if (rc == CUDA_SUCCESS && !milliseconds) rc = CUDA_ERROR_INVALID_VALUE;
  if (rc == CUDA_SUCCESS && (!from || !to || !atomic_load(&from->recorded) ||
                             !atomic_load(&to->recorded)))
    rc = CUDA_ERROR_INVALID_HANDLE;
  if (rc == CUDA_SUCCESS && (!reached(from) || !reached(to))) rc = CUDA_ERROR_NOT_READY;
  if (rc == CUDA_SUCCESS)
    *milliseconds = (float)((double)(atomic_load(&to->time) - atomic_load(&from->time)) / 1e6);
  return rc;
}
