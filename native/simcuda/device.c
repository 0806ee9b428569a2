/* Devices and contexts. SIMCUDA_DEVICES tells their number, 8 without it. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "simcuda.h"

#define MAX_DEVICES 64
#define DRIVER_VERSION 12040

struct context {
  _Atomic int users;
};

static struct context g_contexts[MAX_DEVICES];
static _Atomic bool g_initialized;
static _Atomic int g_fault;
static _Thread_local struct context *t_current;

static int device_count(void) {
  const char *text = getenv("SIMCUDA_DEVICES");
  long n = text && *text ? strtol(text, NULL, 10) : 8;
  return n < 0 ? 0 : n > MAX_DEVICES ? MAX_DEVICES : (int)n;
}

static int check_device(int device) {
  if (!atomic_load(&g_initialized)) return CUDA_ERROR_NOT_INITIALIZED;
  return device < 0 || device >= device_count() ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

int sim_ready(void) {
  if (!atomic_load(&g_initialized)) return CUDA_ERROR_NOT_INITIALIZED;
  if (!t_current || atomic_load(&t_current->users) == 0) return CUDA_ERROR_INVALID_CONTEXT;
  return atomic_load(&g_fault);
}

void sim_fault(int error) {
  int none = 0;
  atomic_compare_exchange_strong(&g_fault, &none, error);
}

SIM_CUDA cuInit(unsigned flags) {
  if (flags) return CUDA_ERROR_INVALID_VALUE;
  atomic_store(&g_initialized, true);
  sim_link();
  return CUDA_SUCCESS;
}

SIM_CUDA cuDriverGetVersion(int *version) {
  if (!version) return CUDA_ERROR_INVALID_VALUE;
  *version = DRIVER_VERSION;
  return CUDA_SUCCESS;
}

SIM_CUDA cuDeviceGetCount(int *count) {
  if (!count) return CUDA_ERROR_INVALID_VALUE;
  if (!atomic_load(&g_initialized)) return CUDA_ERROR_NOT_INITIALIZED;
  *count = device_count();
  return CUDA_SUCCESS;
}

SIM_CUDA cuDeviceGet(int *device, int ordinal) {
  int rc = check_device(ordinal);
  if (rc == CUDA_SUCCESS && !device) rc = CUDA_ERROR_INVALID_VALUE;
  if (rc == CUDA_SUCCESS) *device = ordinal;
  return rc;
}

SIM_CUDA cuDeviceGetName(char *name, int size, int device) {
  int rc = check_device(device);
  if (rc == CUDA_SUCCESS && (!name || size < 1)) rc = CUDA_ERROR_INVALID_VALUE;
  if (rc == CUDA_SUCCESS) snprintf(name, (size_t)size, "simcuda (host memory) %d", device);
  return rc;
}

SIM_CUDA cuDevicePrimaryCtxRetain(void **context, int device) {
  int rc = check_device(device);
  if (rc == CUDA_SUCCESS && !context) rc = CUDA_ERROR_INVALID_VALUE;
  if (rc != CUDA_SUCCESS) return rc;
  atomic_fetch_add(&g_contexts[device].users, 1);
  *context = &g_contexts[device];
  sim_link();
  return CUDA_SUCCESS;
}

SIM_CUDA cuDevicePrimaryCtxRelease_v2(int device) {
  int rc = check_device(device);
  if (rc == CUDA_SUCCESS && atomic_load(&g_contexts[device].users) < 1)
    rc = CUDA_ERROR_INVALID_CONTEXT;
  if (rc == CUDA_SUCCESS) atomic_fetch_sub(&g_contexts[device].users, 1);
  return rc;
}

SIM_CUDA cuCtxSetCurrent(void *context) {
  struct context *c = context;
  if (!atomic_load(&g_initialized)) return CUDA_ERROR_NOT_INITIALIZED;
  if (c && (c < g_contexts || c >= g_contexts + MAX_DEVICES)) return CUDA_ERROR_INVALID_CONTEXT;
  t_current = c;
  if (c) sim_link_device((int)(c - g_contexts));
  return CUDA_SUCCESS;
}

SIM_CUDA cuCtxGetCurrent(void **context) {
  if (!context) return CUDA_ERROR_INVALID_VALUE;
  *context = t_current;
  return CUDA_SUCCESS;
}

SIM_CUDA cuGetErrorString(int error, const char **text) {
  static const struct {
    int error;
    const char *text;
  } texts[] = {
      {CUDA_SUCCESS, "no error"},
      {CUDA_ERROR_INVALID_VALUE, "invalid argument"},
      {CUDA_ERROR_OUT_OF_MEMORY, "out of memory"},
      {CUDA_ERROR_NOT_INITIALIZED, "initialization error"},
      {CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"},
      {CUDA_ERROR_INVALID_CONTEXT, "invalid device context"},
      {CUDA_ERROR_INVALID_PTX, "a PTX JIT compilation failed"},
      {CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"},
      {CUDA_ERROR_NOT_FOUND, "named symbol not found"},
      {CUDA_ERROR_NOT_READY, "device not ready"},
      {CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"},
  };
  if (!text) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
    if (texts[i].error == error) {
      *text = texts[i].text;
      return CUDA_SUCCESS;
    }
  *text = NULL;
  return CUDA_ERROR_INVALID_VALUE;
}
