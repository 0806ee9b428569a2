/* simcuda's inside: a stand-in for the CUDA driver with host memory as the device's.
 *
 * memory.c  allocations, copies, which pointers are the device's
 * stream.c  streams and events, and the tie to simnccl's streams
 * kernel.c  modules and the kernels that it can run
 * device.c  devices, contexts, texts */
#ifndef SIMCUDA_H
#define SIMCUDA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SIM_CUDA __attribute__((visibility("default"))) int

enum {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_NOT_INITIALIZED = 3,
  CUDA_ERROR_INVALID_DEVICE = 101,
  CUDA_ERROR_INVALID_CONTEXT = 201,
  CUDA_ERROR_INVALID_PTX = 218,
  CUDA_ERROR_INVALID_HANDLE = 400,
  CUDA_ERROR_NOT_FOUND = 500,
  CUDA_ERROR_NOT_READY = 600,
  CUDA_ERROR_ILLEGAL_ADDRESS = 700,
};

typedef uint64_t CUdeviceptr;
typedef int (*sim_step)(void *arg); /* not 0 when it is done */

/* Queues a step behind everything of the stream, simnccl's calls included. */
void sim_enqueue(void *stream, sim_step step, void *arg);
void sim_link(void);           /* looks for simnccl in this process */
void sim_link_device(int dev); /* the device of this thread, for simnccl */
int sim_ready(void);           /* 0, or why a call is refused: no context, or an earlier fault */
void sim_fault(int error);     /* what a kernel did wrong: every later call says so */
bool sim_holds(CUdeviceptr pointer, size_t size);

#endif
