/* nccl_load: runs NCCL workloads from a library given by path, for tests and
 * benchmarks. It links no NCCL: the library is opened RTLD_LOCAL and each
 * function is looked up, or (--resolve default) looked up in the global scope
 * so that an LD_PRELOAD library comes first. See usage(). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <getopt.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "simnccl.h"

#define REPEATS 5
#define MAX_THREADS 256

/* Functions that are called, in the order of the truth line. */
#define APIS(X) \
  X(ncclGetUniqueId) X(ncclCommInitRank) X(ncclCommDestroy) X(ncclAllReduce) X(ncclBroadcast) X(ncclBcast) \
  X(ncclReduce) X(ncclAllGather) X(ncclReduceScatter) X(ncclAlltoAll) X(ncclGather) \
  X(ncclScatter) X(ncclSend) X(ncclRecv) X(ncclGroupStart) X(ncclGroupEnd)

enum api {
#define X(name) A_##name,
  APIS(X)
#undef X
  A_COUNT
};
static const char *const g_names[A_COUNT] = {
#define X(name) #name,
    APIS(X)
#undef X
};
static struct {
#define X(name) __typeof__(&name) name;
  APIS(X)
#undef X
  __typeof__(&simStreamCreate) stream_create;
  __typeof__(&simStreamSynchronize) stream_sync;
  __typeof__(&simSetDevice) set_device;
} nccl;

enum op { OP_ALLREDUCE, OP_MIX, OP_GROUP, OP_P2P, OP_ROOTED, OP_ALL, OP_COUNT };
static const char *const g_ops[OP_COUNT] = {"allreduce", "mix", "group", "p2p", "rooted", "all"};

static struct {
  enum op op;
  const char *lib, *uid_file, *resolve;
  int rank, nranks, threads;
  long calls, sync_every;
  double rate, hold;
  size_t count;
  bool churn, null_comm, bench, truth, destroy, wait_stdin;
} opt = {.resolve = "handle", .nranks = 1, .threads = 1, .calls = 100,
         .count = 256, .destroy = true};

struct worker { /* one communicator, one stream, one thread */
  pthread_t thread;
  ncclUniqueId id;
  ncclComm_t comm;
  cudaStream_t stream;
  uint64_t calls[A_COUNT], errors;
  uint64_t on_comm; /* data calls that named this communicator */
};
static struct worker g_workers[MAX_THREADS];

_Noreturn static void die(const char *what, const char *why) {
  fprintf(stderr, "nccl_load: %s: %s\n", what, why);
  exit(2);
}

/* Counts a call and its outcome; DATA for those that name the communicator. */
#define DO(w, name, ...) count_call((w), A_##name, nccl.name(__VA_ARGS__))
#define DATA(w, name, ...) ((w)->on_comm++, DO(w, name, __VA_ARGS__))

static ncclResult_t count_call(struct worker *w, enum api api, ncclResult_t rc) {
  w->calls[api]++;
  if (rc != ncclSuccess && rc != ncclInProgress) w->errors++;
  return rc;
}

/* Old libraries lack some, NVIDIA's lacks the sim functions. */
static void *look_up(void *scope, const char *name) {
  static const char optional[] = "ncclAlltoAll ncclGather ncclScatter";
  void *p = dlsym(scope, name);
  if (!p && strncmp(name, "nccl", 4) == 0 && !strstr(optional, name)) die(name, "not in the library");
  return p;
}

static void load(void) {
  bool global = strcmp(opt.resolve, "default") == 0;
  void *handle = opt.lib ? dlopen(opt.lib, RTLD_NOW | (global ? RTLD_GLOBAL : RTLD_LOCAL)) : NULL;
  if (opt.lib && !handle) die("dlopen", dlerror());
  if (!opt.lib && !global) die("--lib", "is needed");
  void *scope = global ? RTLD_DEFAULT : handle;
#define X(name) *(void **)(void *)&nccl.name = look_up(scope, #name);
  APIS(X)
#undef X
  *(void **)(void *)&nccl.stream_create = look_up(scope, "simStreamCreate");
  *(void **)(void *)&nccl.stream_sync = look_up(scope, "simStreamSynchronize");
  *(void **)(void *)&nccl.set_device = look_up(scope, "simSetDevice");
}

static uint64_t now_ns(void) {
  struct timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static void sleep_until(uint64_t ns) {
  struct timespec ts = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &ts, NULL) == EINTR) {
  }
}

/* Rank 0 writes all ids at once (rename is atomic), the others wait for the file. */
static void share_ids(void) {
  size_t n = (size_t)opt.threads;
  ncclUniqueId ids[MAX_THREADS];
  if (opt.rank == 0) {
    for (int t = 0; t < opt.threads; t++)
      if (DO(&g_workers[t], ncclGetUniqueId, &ids[t]) != ncclSuccess) die("ncclGetUniqueId", "failed");
    if (opt.nranks > 1) {
      char tmp[4096];
      snprintf(tmp, sizeof tmp, "%s.%d", opt.uid_file, getpid());
      FILE *f = fopen(tmp, "wbx");
      if (!f || fwrite(ids, sizeof *ids, n, f) != n || fclose(f) != 0 || rename(tmp, opt.uid_file) != 0)
        die(tmp, strerror(errno));
    }
  } else {
    FILE *f;
    while (!(f = fopen(opt.uid_file, "rb"))) usleep(2000);
    if (fread(ids, sizeof *ids, n, f) != n) die(opt.uid_file, "holds too few ids (--threads differ?)");
    fclose(f);
  }
  for (int t = 0; t < opt.threads; t++) g_workers[t].id = ids[t];
}

/* ---- what one step does ---- */
static void allreduce(struct worker *w) {
  DATA(w, ncclAllReduce, NULL, NULL, opt.count, ncclFloat32, ncclSum, w->comm, w->stream);
}

static void mix(struct worker *w, long i) {
  size_t n = opt.count;
  ncclDataType_t f = ncclFloat32;
  int root = (int)(i % opt.nranks);
  switch (i % 6) {
  case 0: allreduce(w); break;
  case 1: DATA(w, ncclBroadcast, NULL, NULL, n, f, root, w->comm, w->stream); break;
  case 2: DATA(w, ncclReduce, NULL, NULL, n, f, ncclMax, root, w->comm, w->stream); break;
  case 3: DATA(w, ncclAllGather, NULL, NULL, n, f, w->comm, w->stream); break;
  case 4: DATA(w, ncclReduceScatter, NULL, NULL, n, f, ncclSum, w->comm, w->stream); break;
  default: DATA(w, ncclBcast, NULL, n, f, root, w->comm, w->stream); break;
  }
}

static void group(struct worker *w) {
  DO(w, ncclGroupStart);
  for (int k = 0; k < 3; k++) allreduce(w);
  DO(w, ncclGroupEnd);
}

static void p2p(struct worker *w) { /* a ring: send to the next, receive from the one before */
  int next = (opt.rank + 1) % opt.nranks, prev = (opt.rank + opt.nranks - 1) % opt.nranks;
  DO(w, ncclGroupStart);
  DATA(w, ncclSend, NULL, opt.count, ncclFloat32, next, w->comm, w->stream);
  DATA(w, ncclRecv, NULL, opt.count, ncclFloat32, prev, w->comm, w->stream);
  DO(w, ncclGroupEnd);
}

static void rooted(struct worker *w, long i) {
  int root = (int)(i % opt.nranks);
  if (nccl.ncclAlltoAll && i % 3 == 0)
    DATA(w, ncclAlltoAll, NULL, NULL, opt.count, ncclFloat32, w->comm, w->stream);
  if (nccl.ncclGather && i % 3 == 1)
    DATA(w, ncclGather, NULL, NULL, opt.count, ncclFloat32, root, w->comm, w->stream);
  if (nccl.ncclScatter && i % 3 == 2)
    DATA(w, ncclScatter, NULL, NULL, opt.count, ncclFloat32, root, w->comm, w->stream);
}

static void step(struct worker *w, long i) {
  enum op op = opt.op == OP_ALL ? (enum op)(OP_MIX + i % 4) : opt.op;
  long n = opt.op == OP_ALL ? i / 4 : i;
  switch (op) {
  case OP_MIX: mix(w, n); break;
  case OP_GROUP: group(w); break;
  case OP_P2P: p2p(w); break;
  case OP_ROOTED: rooted(w, n); break;
  default: allreduce(w); break;
  }
}

static void sync_stream(struct worker *w) {
  if (nccl.stream_sync && !opt.null_comm) nccl.stream_sync(w->stream);
}

static void steps(struct worker *w) {
  uint64_t start = now_ns();
  for (long i = 0; i < opt.calls; i++) {
    if (opt.rate > 0) sleep_until(start + (uint64_t)((double)i * 1e9 / opt.rate));
    step(w, i);
    if (opt.sync_every > 0 && (i + 1) % opt.sync_every == 0) sync_stream(w);
  }
  sync_stream(w);
}

/* One-rank communicators, made and destroyed: pointers come again. */
static void churn(struct worker *w) {
  for (long i = 0; i < opt.calls; i++) {
    ncclUniqueId id;
    if (DO(w, ncclGetUniqueId, &id) != ncclSuccess) return;
    w->comm = NULL;
    if (DO(w, ncclCommInitRank, &w->comm, 1, id, 0) != ncclSuccess) continue;
    for (int k = 0; k < 3; k++) allreduce(w);
    DO(w, ncclCommDestroy, w->comm);
  }
}

static void *work(void *arg) {
  struct worker *w = arg;
  if (nccl.set_device) nccl.set_device(opt.rank);
  if (nccl.stream_create) w->stream = nccl.stream_create();
  if (opt.churn) {
    churn(w);
    return NULL;
  }
  if (!opt.null_comm && DO(w, ncclCommInitRank, &w->comm, opt.nranks, w->id, opt.rank) != ncclSuccess)
    die("ncclCommInitRank", "failed");
  if (opt.bench) return NULL;
  steps(w);
  if (opt.destroy && !opt.null_comm) DO(w, ncclCommDestroy, w->comm);
  return NULL;
}

/* ---- output ---- */
static void print_truth(void) {
  uint64_t total[A_COUNT] = {0}, errors = 0;
  for (int t = 0; t < opt.threads; t++) {
    for (int a = 0; a < A_COUNT; a++) total[a] += g_workers[t].calls[a];
    errors += g_workers[t].errors;
  }
  printf("{\"pid\":%d,\"rank\":%d,\"nranks\":%d,\"errors\":%llu,\"calls\":{", getpid(), opt.rank,
         opt.nranks, (unsigned long long)errors);
  const char *sep = "";
  for (int a = 0; a < A_COUNT; a++)
    if (total[a]) {
      printf("%s\"%s\":%llu", sep, g_names[a], (unsigned long long)total[a]);
      sep = ",";
    }
  printf("},\"comms\":[");
  for (int t = 0; t < opt.threads; t++)
    printf("%s{\"thread\":%d,\"ptr\":\"%p\",\"data_calls\":%llu}", t ? "," : "", t,
           (void *)g_workers[t].comm, (unsigned long long)g_workers[t].on_comm);
  printf("]}\n");
  fflush(stdout);
}

static void bench(struct worker *w) {
  double ns[REPEATS];
  for (int r = 0; r < REPEATS; r++) {
    uint64_t start = now_ns();
    for (long i = 0; i < opt.calls; i++) {
      step(w, i);
      if (opt.sync_every > 0 && (i + 1) % opt.sync_every == 0) sync_stream(w);
    }
    ns[r] = (double)(now_ns() - start) / (double)opt.calls;
    sync_stream(w);
  }
  printf("{\"pid\":%d,\"op\":\"%s\",\"steps\":%ld,\"ns_per_step\":[", getpid(), g_ops[opt.op], opt.calls);
  for (int r = 0; r < REPEATS; r++) printf("%s%.1f", r ? "," : "", ns[r]);
  printf("]}\n");
  fflush(stdout);
}

static void usage(FILE *out) {
  fputs("usage: nccl_load --lib PATH [options]\n"
        "  --resolve handle|default  look functions up in the library (RTLD_LOCAL), or in the\n"
        "                        global scope, where an LD_PRELOAD library comes first\n"
        "  --rank R --nranks N   this process's place; with N > 1 also:\n"
        "  --uid-file PATH       rank 0 writes the unique ids there, the others wait for it\n"
        "  --calls K             steps per thread (default 100)\n"
        "  --rate C              steps per second and thread; 0: flat out (default)\n"
        "  --op NAME             allreduce (default), mix, group (3 all-reduces), p2p (ring),\n"
        "                        rooted (alltoall, gather, scatter), all\n"
        "  --count C             elements (float32) per call (default 256)\n"
        "  --threads T           each with a communicator and a stream of its own\n"
        "  --sync-every M        wait for the stream every M steps\n"
        "  --churn               K times: init one rank, 3 all-reduces, destroy\n"
        "  --null-comm           calls with comm NULL: entered, refused with 4 (no GPU needed)\n"
        "  --no-destroy          leave without ncclCommDestroy\n"
        "  --wait-stdin          begin when a line comes on stdin (\"ready\" is printed first)\n"
        "  --hold S              sleep at the end\n"
        "  --bench               5 repeats of K steps, ns per step as JSON\n"
        "  --print-truth         the calls made, as JSON\n",
        out);
}

static enum op parse_op(const char *name) {
  for (int i = 0; i < OP_COUNT; i++)
    if (strcmp(name, g_ops[i]) == 0) return (enum op)i;
  die("--op", "allreduce, mix, group, p2p, rooted or all");
}

static void parse(int argc, char **argv) {
  enum { LIB = 1, UID, RANK, NRANKS, CALLS, RATE, OPTION_OP, THREADS, COUNT, SYNC, CHURN, NULLC, BENCH,
         TRUTH, NODESTROY, STDIN, HOLD, RESOLVE, HELP };
  static const struct option longs[] = {
      {"lib", 1, 0, LIB}, {"uid-file", 1, 0, UID}, {"ranks-file", 1, 0, UID}, {"rank", 1, 0, RANK},
      {"nranks", 1, 0, NRANKS}, {"calls", 1, 0, CALLS}, {"rate", 1, 0, RATE}, {"op", 1, 0, OPTION_OP},
      {"threads", 1, 0, THREADS}, {"count", 1, 0, COUNT}, {"sync-every", 1, 0, SYNC},
      {"churn", 0, 0, CHURN}, {"null-comm", 0, 0, NULLC}, {"bench", 0, 0, BENCH},
      {"print-truth", 0, 0, TRUTH}, {"no-destroy", 0, 0, NODESTROY}, {"wait-stdin", 0, 0, STDIN},
      {"hold", 1, 0, HOLD}, {"resolve", 1, 0, RESOLVE}, {"help", 0, 0, HELP}, {0}};
  for (int c; (c = getopt_long(argc, argv, "", longs, NULL)) != -1;) switch (c) {
    case LIB: opt.lib = optarg; break;
    case UID: opt.uid_file = optarg; break;
    case RANK: opt.rank = atoi(optarg); break;
    case NRANKS: opt.nranks = atoi(optarg); break;
    case CALLS: opt.calls = atol(optarg); break;
    case RATE: opt.rate = atof(optarg); break;
    case OPTION_OP: opt.op = parse_op(optarg); break;
    case THREADS: opt.threads = atoi(optarg); break;
    case COUNT: opt.count = strtoul(optarg, NULL, 10); break;
    case SYNC: opt.sync_every = atol(optarg); break;
    case CHURN: opt.churn = true; break;
    case NULLC: opt.null_comm = true; break;
    case BENCH: opt.bench = true; break;
    case TRUTH: opt.truth = true; break;
    case NODESTROY: opt.destroy = false; break;
    case STDIN: opt.wait_stdin = true; break;
    case HOLD: opt.hold = atof(optarg); break;
    case RESOLVE: opt.resolve = optarg; break;
    case HELP: usage(stdout); exit(0);
    default: usage(stderr); exit(2);
    }
  if (opt.threads < 1 || opt.threads > MAX_THREADS) die("--threads", "1 to 256");
  if (opt.nranks < 1 || opt.rank < 0 || opt.rank >= opt.nranks) die("--rank", "not in 0..nranks-1");
  if (opt.nranks > 1 && !opt.uid_file && !opt.null_comm) die("--uid-file", "is needed with --nranks");
  if (opt.bench && (opt.threads > 1 || opt.churn)) die("--bench", "with one thread and no --churn");
}

int main(int argc, char **argv) {
  parse(argc, argv);
  load();
  if (opt.wait_stdin) {
    printf("ready %d\n", getpid());
    fflush(stdout);
    if (getchar() == EOF) return 0;
  }
  if (!opt.churn && !opt.null_comm) share_ids();
  for (int t = 0; t < opt.threads; t++) {
    if (pthread_create(&g_workers[t].thread, NULL, work, &g_workers[t]) != 0)
      die("pthread_create", strerror(errno));
  }
  for (int t = 0; t < opt.threads; t++) pthread_join(g_workers[t].thread, NULL);
  if (opt.bench) {
    bench(&g_workers[0]);
    if (opt.destroy && !opt.null_comm) DO(&g_workers[0], ncclCommDestroy, g_workers[0].comm);
  }
  if (opt.truth) print_truth();
  if (opt.hold > 0) usleep((useconds_t)(opt.hold * 1e6));
  return 0;
}
