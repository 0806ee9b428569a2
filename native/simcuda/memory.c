/* Device memory is host memory that is remembered, so that other pointers are refused. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "simcuda.h"

#define ALIGNMENT 256

struct block {
  struct block *next;
  char *base;
  size_t size;
};

static pthread_mutex_t g_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct block *g_blocks;

static char *at(CUdeviceptr pointer) { return (char *)(uintptr_t)pointer; }

bool sim_holds(CUdeviceptr pointer, size_t size) {
  bool found = false;
  pthread_mutex_lock(&g_mutex);
  for (struct block *b = g_blocks; b && !found; b = b->next) {
    uint64_t base = (uint64_t)(uintptr_t)b->base;
    found = pointer >= base && pointer - base <= b->size && size <= b->size - (pointer - base);
  }
  pthread_mutex_unlock(&g_mutex);
  return found;
}

/* What simnccl asks before it moves bytes. */
__attribute__((visibility("default"))) int simcudaHolds(const void *pointer, size_t size) {
  return sim_holds((CUdeviceptr)(uintptr_t)pointer, size);
}

SIM_CUDA cuMemAlloc_v2(CUdeviceptr *pointer, size_t size) {
  int rc = sim_ready();
  if (rc == CUDA_SUCCESS && (!pointer || size == 0)) rc = CUDA_ERROR_INVALID_VALUE;
  if (rc != CUDA_SUCCESS) return rc;
  sim_link();
  struct block *b = malloc(sizeof *b);
  size_t whole = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  char *base = whole < size ? NULL : aligned_alloc(ALIGNMENT, whole);
  if (!base || !b) {
    free(base);
    free(b);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  pthread_mutex_lock(&g_mutex);
  *b = (struct block){g_blocks, base, size};
  g_blocks = b;
  pthread_mutex_unlock(&g_mutex);
  *pointer = (CUdeviceptr)(uintptr_t)base;
  return CUDA_SUCCESS;
}

SIM_CUDA cuMemFree_v2(CUdeviceptr pointer) {
  struct block *found = NULL;
  if (!pointer) return CUDA_SUCCESS;
  pthread_mutex_lock(&g_mutex);
  for (struct block **p = &g_blocks; *p && !found; p = &(*p)->next)
    if ((*p)->base == at(pointer)) {
      found = *p;
      *p = found->next;
      break;
    }
  pthread_mutex_unlock(&g_mutex);
  if (!found) return CUDA_ERROR_INVALID_VALUE;
  free(found->base);
  free(found);
  return sim_ready();
}

SIM_CUDA cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size) {
  int rc = sim_ready();
  if (rc == CUDA_SUCCESS && size && !sim_holds(to, size)) rc = CUDA_ERROR_INVALID_VALUE;
  if (rc == CUDA_SUCCESS) memcpy(at(to), from, size);
  return rc;
}

SIM_CUDA cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size) {
  int rc = sim_ready();
  if (rc == CUDA_SUCCESS && size && !sim_holds(from, size)) rc = CUDA_ERROR_INVALID_VALUE;
  if (rc == CUDA_SUCCESS) memcpy(to, at(from), size);
  return rc;
}

SIM_CUDA cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t size) {
  int rc = sim_ready();
  if (rc == CUDA_SUCCESS && size && !sim_holds(to, size)) rc = CUDA_ERROR_INVALID_VALUE;
  if (rc == CUDA_SUCCESS) memset(at(to), value, size);
  return rc;
}

/* ---- in the order of a stream ---- */
struct copy {
  void *to;
  const void *from;
  size_t size;
  char staged[]; /* the host's bytes as they were at the call */
};

static int copy_step(void *arg) {
  struct copy *c = arg;
  memmove(c->to, c->from, c->size);
  free(c);
  return 1;
}

static int copy_async(void *to, const void *from, size_t size, bool stage, void *stream) {
  struct copy *c = malloc(sizeof *c + (stage ? size : 0));
  if (!c) return CUDA_ERROR_OUT_OF_MEMORY;
  *c = (struct copy){to, from, size};
  if (stage) c->from = memcpy(c->staged, from, size);
  sim_enqueue(stream, copy_step, c);
  return CUDA_SUCCESS;
}

SIM_CUDA cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, void *stream) {
  int rc = sim_ready();
  if (rc == CUDA_SUCCESS && size && !sim_holds(to, size)) rc = CUDA_ERROR_INVALID_VALUE;
  return rc == CUDA_SUCCESS ? copy_async(at(to), from, size, true, stream) : rc;
}

SIM_CUDA cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, void *stream) {
  int rc = sim_ready();
  if (rc == CUDA_SUCCESS && size && !sim_holds(from, size)) rc = CUDA_ERROR_INVALID_VALUE;
  return rc == CUDA_SUCCESS ? copy_async(to, at(from), size, false, stream) : rc;
}

SIM_CUDA cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, void *stream) {
  int rc = sim_ready();
  if (rc == CUDA_SUCCESS && size && (!sim_holds(from, size) || !sim_holds(to, size)))
    rc = CUDA_ERROR_INVALID_VALUE;
  return rc == CUDA_SUCCESS ? copy_async(at(to), at(from), size, false, stream) : rc;
}
