/* Accessors, registration, texts and the checks that every call makes. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sim.h"

struct sim_window {
  void *buff;
  size_t size;
};

/* Found by tools that look for a version in the file itself. */
__attribute__((used)) static const char g_banner[] = "NCCL version " SIM_VERSION "+sim";

static _Thread_local char t_last_error[256];

long sim_env(const char *name, long fallback) {
  const char *text = getenv(name);
  return text && *text ? strtol(text, NULL, 10) : fallback;
}

size_t sim_type_size(ncclDataType_t t) {
  static const unsigned char sizes[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return sizes[t];
}

static bool log_level(const char *level) {
  const char *text = getenv("NCCL_DEBUG");
  return text && (strcmp(text, level) == 0 || strcmp(text, "INFO") == 0);
}

ncclResult_t sim_fail(ncclResult_t rc, const char *fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(t_last_error, sizeof t_last_error, fmt, ap);
  va_end(ap);
  if (log_level("WARN")) fprintf(stderr, "simnccl WARN %s\n", t_last_error);
  return rc;
}

void sim_info(struct ncclComm *comm, const char *fmt, ...) {
  if (!log_level("INFO")) return;
  char text[256], host[64] = "";
  gethostname(host, sizeof host - 1);
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(text, sizeof text, fmt, ap);
  va_end(ap);
  printf("%s:%d:%d [%d] NCCL INFO %s\n", host, getpid(), gettid(), comm->sim->dev, text);
  fflush(stdout);
}

ncclResult_t sim_check(struct ncclComm *comm) {
  if (!comm) return sim_fail(ncclInvalidArgument, "comm argument is NULL");
#if SIM_VERSION_CODE >= 22100
  if (comm->startMagic != SIM_MAGIC || comm->endMagic != SIM_MAGIC)
    return sim_fail(ncclInvalidArgument, "corrupted comm object detected");
#endif
  return ncclSuccess;
}

/* Asks through the linkage table, as NCCL does in every call. */
ncclResult_t sim_check_ready(struct ncclComm *comm) {
  ncclResult_t async;
  ncclResult_t rc = ncclCommGetAsyncError(comm, &async);
  if (rc != ncclSuccess) return rc;
  if (async == ncclInProgress)
    return sim_fail(ncclInvalidArgument,
                    "Attempt to use communicator before the previous operation returned ncclSuccess");
  return async;
}

/* The compiler leaves the frame out where nothing is called; the real entry has it. */
#define KEEP_FRAME() __asm__ volatile("" : : "r"(__builtin_frame_address(0)))

SIM_API(ncclResult_t, ncclGetVersion, int *version) {
  KEEP_FRAME();
  if (!version) return ncclInvalidArgument;
  *version = SIM_VERSION_CODE;
  return ncclSuccess;
}

SIM_API(const char *, ncclGetErrorString, ncclResult_t result) {
  KEEP_FRAME();
  static const char *const texts[] = {
      "no error", "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
      "unhandled system error (run with NCCL_DEBUG=INFO for details)",
      "internal error - please report this issue to the NCCL developers",
      "invalid argument (run with NCCL_DEBUG=WARN for details)",
      "invalid usage (run with NCCL_DEBUG=WARN for details)",
      "remote process exited or there was a network error", "NCCL operation in progress"};
  return (unsigned)result < sizeof texts / sizeof *texts ? texts[result] : "unknown result code";
}

SIM_API(const char *, ncclGetLastError, ncclComm_t comm) {
  KEEP_FRAME();
  (void)comm;
  return t_last_error;
}

/* Plain loads from the struct: the offsets can be read off these functions. */
#define ACCESSOR(name, field) \
  SIM_API(ncclResult_t, name, const ncclComm_t comm, int *out) { \
    ncclResult_t rc = sim_check(comm); \
    if (rc == ncclSuccess && !out) rc = sim_fail(ncclInvalidArgument, #name ": NULL"); \
    if (rc == ncclSuccess) rc = sim_check_ready(comm); \
    if (rc != ncclSuccess) return rc; \
    *out = comm->field; \
    return ncclSuccess; \
  }
ACCESSOR(ncclCommCount, nRanks)
ACCESSOR(ncclCommUserRank, rank)
ACCESSOR(ncclCommCuDevice, cudaDev)

SIM_API(ncclResult_t, ncclCommGetAsyncError, ncclComm_t comm, ncclResult_t *asyncError) {
  ncclResult_t rc = sim_check(comm);
  if (rc != ncclSuccess) return rc;
  if (!asyncError) return sim_fail(ncclInvalidArgument, "asyncError argument is NULL");
  *asyncError = (ncclResult_t)atomic_load_explicit(&comm->asyncResult, memory_order_acquire);
  return ncclSuccess;
}

static ncclResult_t suspend(struct ncclComm *comm, bool to) {
  ncclResult_t rc = sim_check(comm);
  if (rc == ncclSuccess) rc = sim_check_ready(comm);
  if (rc == ncclSuccess && comm->sim->suspended == to) rc = ncclInvalidUsage;
  if (rc == ncclSuccess) comm->sim->suspended = to;
  return rc;
}

SIM_API(ncclResult_t, ncclCommSuspend, ncclComm_t comm, int flags) {
  (void)flags;
  return sim_group_error(suspend(comm, true));
}

SIM_API(ncclResult_t, ncclCommResume, ncclComm_t comm) {
  return sim_group_error(suspend(comm, false));
}

/* ---- registration ---- */
static struct sim_window *window_new(void *buff, size_t size) {
  struct sim_window *w = malloc(sizeof *w);
  *w = (struct sim_window){buff, size};
  return w;
}

SIM_API(ncclResult_t, ncclCommRegister, const ncclComm_t comm, void *buff, size_t size,
        void **handle) {
  ncclResult_t rc = sim_check(comm);
  if (rc == ncclSuccess && !handle) rc = ncclInvalidArgument;
  if (rc == ncclSuccess) *handle = window_new(buff, size);
  return rc;
}

SIM_API(ncclResult_t, ncclCommDeregister, const ncclComm_t comm, void *handle) {
  ncclResult_t rc = sim_check(comm);
  if (rc == ncclSuccess) free(handle);
  return rc;
}

/* Collective: waits for all ranks, in a group at its end. */
SIM_API(ncclResult_t, ncclCommWindowRegister, ncclComm_t comm, void *buff, size_t size,
        ncclWindow_t *win, int winFlags) {
  (void)winFlags;
  ncclResult_t rc = sim_check(comm);
  if (rc == ncclSuccess) rc = sim_check_ready(comm);
  if (rc == ncclSuccess && !win) rc = ncclInvalidArgument;
  if (rc != ncclSuccess) return sim_group_error(rc);
  *win = window_new(buff, size);
  struct sim_job *job = calloc(1, sizeof *job);
  job->kind = JOB_BARRIER;
  job->parent = comm;
  job->nonblocking = comm->sim->nonblocking;
  sim_lock();
  job->gen = ++comm->sim->xmade;
  sim_unlock();
  return sim_job_submit(job);
}

SIM_API(ncclResult_t, ncclCommWindowDeregister, ncclComm_t comm, ncclWindow_t win) {
  if (!win) return ncclSuccess;
  ncclResult_t rc = sim_check(comm);
  if (rc == ncclSuccess) free(win);
  return rc;
}

SIM_API(ncclResult_t, ncclMemAlloc, void **ptr, size_t size) {
  if (!ptr || size == 0) return sim_fail(ncclInvalidArgument, "MemAlloc: %zu bytes", size);
  *ptr = malloc(size);
  return *ptr ? ncclSuccess : ncclSystemError;
}

SIM_API(ncclResult_t, ncclMemFree, void *ptr) {
  free(ptr);
  return ncclSuccess;
}

SIM_API(ncclResult_t, ncclDevCommCreate, ncclComm_t comm, const void *requirements,
        void *outDevComm) {
  (void)requirements, (void)outDevComm;
  return sim_check(comm);
}

SIM_API(ncclResult_t, ncclDevCommDestroy, ncclComm_t comm, const void *devComm) {
  (void)devComm;
  ncclResult_t rc = sim_check(comm);
  return rc == ncclSuccess ? ncclCommWindowDeregister(comm, NULL) : rc; /* nested, as in NCCL */
}

SIM_API(ncclResult_t, ncclRedOpCreatePreMulSum, ncclRedOp_t *op, void *scalar,
        ncclDataType_t datatype, ncclScalarResidence_t residence, ncclComm_t comm) {
  (void)scalar, (void)datatype, (void)residence;
  ncclResult_t rc = sim_check(comm);
  if (rc == ncclSuccess && !op) rc = ncclInvalidArgument;
  if (rc == ncclSuccess) *op = (ncclRedOp_t)(ncclNumOps + (int)atomic_fetch_add(&comm->sim->redops, 1));
  return rc;
}

SIM_API(ncclResult_t, ncclRedOpDestroy, ncclRedOp_t op, ncclComm_t comm) {
  ncclResult_t rc = sim_check(comm);
  if (rc == ncclSuccess && op < ncclNumOps) rc = sim_fail(ncclInvalidArgument, "operation %d", (int)op);
  return rc;
}
