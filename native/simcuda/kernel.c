/* Modules and kernels. It does not run PTX: it looks for the entries it knows by
 * name and does the same in C, with the same rounding. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "simcuda.h"

#define MAX_THREADS 1024

struct function {
  const char *name;
  size_t size; /* bytes of an element */
  void (*add)(void *out, const void *a, const void *b, size_t n);
};

struct module {
  char *text;
};

static void add_f32(void *out, const void *a, const void *b, size_t n) {
  float *o = out;
  const float *x = a, *y = b;
  for (size_t i = 0; i < n; i++) o[i] = x[i] + y[i];
}

static float widen(uint16_t v) {
  uint32_t bits = (uint32_t)v << 16;
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

/* To nearest even; a NaN stays one. */
static uint16_t narrow(float f) {
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  if (f != f) return (uint16_t)(bits >> 16 | 64);
  return (uint16_t)((bits + 32767 + (bits >> 16 & 1)) >> 16);
}

static void add_bf16(void *out, const void *a, const void *b, size_t n) {
  uint16_t *o = out;
  const uint16_t *x = a, *y = b;
  for (size_t i = 0; i < n; i++) o[i] = narrow(widen(x[i]) + widen(y[i]));
}

static const struct function g_functions[] = {
    {"ncp_add_f32", 4, add_f32},
    {"ncp_add_bf16", 2, add_bf16},
};

static bool has_entry(const char *text, const char *name) {
  size_t length = strlen(name);
  for (const char *at = text; (at = strstr(at, ".entry ")); ) {
    at += strlen(".entry ");
    if (strncmp(at, name, length) == 0 && (at[length] == '(' || at[length] == '\n' || at[length] == ' '))
      return true;
  }
  return false;
}

SIM_CUDA cuModuleLoadData(void **module, const void *image) {
  int rc = sim_ready();
  if (rc == CUDA_SUCCESS && (!module || !image)) rc = CUDA_ERROR_INVALID_VALUE;
  if (rc != CUDA_SUCCESS) return rc;
  const char *text = image;
  if (strncmp(text, ".version ", strlen(".version ")) != 0 || !strstr(text, ".target sm_") ||
      !strstr(text, ".address_size 64"))
    return CUDA_ERROR_INVALID_PTX;
  struct module *m = malloc(sizeof *m);
  m->text = strdup(text);
  *module = m;
  return CUDA_SUCCESS;
}

SIM_CUDA cuModuleUnload(void *module) {
  struct module *m = module;
  if (!m) return CUDA_ERROR_INVALID_HANDLE;
  free(m->text);
  free(m);
  return sim_ready();
}

SIM_CUDA cuModuleGetFunction(void **function, void *module, const char *name) {
  struct module *m = module;
  int rc = sim_ready();
  if (rc == CUDA_SUCCESS && (!function || !m || !name)) rc = CUDA_ERROR_INVALID_VALUE;
  if (rc != CUDA_SUCCESS) return rc;
  if (!has_entry(m->text, name)) return CUDA_ERROR_NOT_FOUND;
  for (size_t i = 0; i < sizeof g_functions / sizeof *g_functions; i++)
    if (strcmp(g_functions[i].name, name) == 0) {
      *function = (void *)(uintptr_t)&g_functions[i];
      return CUDA_SUCCESS;
    }
  return CUDA_ERROR_NOT_FOUND;
}

struct launch {
  const struct function *function;
  uint64_t out, a, b, n;
};

static int launch_step(void *arg) {
  struct launch *l = arg;
  size_t bytes = l->n * l->function->size;
  if (l->n > SIZE_MAX / 8 || !sim_holds(l->out, bytes) || !sim_holds(l->a, bytes) ||
      !sim_holds(l->b, bytes))
    sim_fault(CUDA_ERROR_ILLEGAL_ADDRESS);
  else
    l->function->add((void *)(uintptr_t)l->out, (const void *)(uintptr_t)l->a,
                     (const void *)(uintptr_t)l->b, l->n);
  free(l);
  return 1;
}

SIM_CUDA cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                        void *stream, void **parameters, void **extra) {
  int rc = sim_ready();
  if (rc == CUDA_SUCCESS && !function) rc = CUDA_ERROR_INVALID_HANDLE;
  uint64_t blocks = (uint64_t)grid_x * grid_y * grid_z;
  uint64_t threads = (uint64_t)block_x * block_y * block_z;
  if (rc == CUDA_SUCCESS && (blocks == 0 || threads == 0 || threads > MAX_THREADS || shared ||
                             !parameters || extra))
    rc = CUDA_ERROR_INVALID_VALUE;
  if (rc != CUDA_SUCCESS) return rc;
  struct launch *l = malloc(sizeof *l);
  l->function = function;
  uint64_t *values[] = {&l->out, &l->a, &l->b, &l->n};
  for (int i = 0; i < 4; i++) memcpy(values[i], parameters[i], sizeof(uint64_t));
  sim_enqueue(stream, launch_step, l);
  return CUDA_SUCCESS;
}
