/* Calls ncclAllReduce of a library in a loop and says how long a call took.
 * For tools/bench capture: one process lives through all configurations.
 *
 *   caller LIB COMM       COMM: null | memory | init
 *   stdin:  "CALLS THREADS\n", repeated    stdout: "ready\n", then "NS_PER_CALL\n" each
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int (*all_reduce_fn)(const void *, void *, size_t, int, int, void *, void *);
typedef struct {
  char bytes[128];
} unique_id;

static all_reduce_fn all_reduce;
static void *comms[16];
static pthread_barrier_t start;
static long calls;

/* CPU time of the thread: what others do on the machine does not count. */
static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void *work(void *arg) {
  double *ns = arg;
  void *comm = comms[(size_t)*ns];
  pthread_barrier_wait(&start);
  double from = now();
  for (long i = 0; i < calls; i++) all_reduce(NULL, NULL, 0, 7, 0, comm, NULL);
  *ns = (now() - from) / (double)calls;
  return NULL;
}

static void *make_comm(void *lib, const char *how) {
  if (strcmp(how, "memory") == 0) {
    void *memory = malloc(4 << 20);
    return memory ? memset(memory, 0, 4 << 20) : NULL;
  }
  if (strcmp(how, "init") == 0) {
    int (*get_id)(unique_id *) = (int (*)(unique_id *))dlsym(lib, "ncclGetUniqueId");
    int (*init)(void **, int, unique_id, int) =
        (int (*)(void **, int, unique_id, int))dlsym(lib, "ncclCommInitRank");
    unique_id id;
    void *comm = NULL;
    if (!get_id || !init || get_id(&id) || init(&comm, 1, id, 0)) exit(3);
    return comm;
  }
  return NULL;
}

int main(int argc, char **argv) {
  if (argc != 3) return 2;
  void *lib = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (!lib) {
    fprintf(stderr, "caller: %s\n", dlerror());
    return 3;
  }
  all_reduce = (all_reduce_fn)dlsym(lib, "ncclAllReduce");
  if (!all_reduce) return 3;
  puts("ready");
  fflush(stdout);
  /* The first command comes when probes are on: only then make communicators. */
  int threads, made = 0;
  while (scanf("%ld %d", &calls, &threads) == 2 && threads > 0 && threads <= 16) {
    for (; made < threads; made++) comms[made] = make_comm(lib, argv[2]);
    pthread_t ids[16];
    double ns[16], sum = 0;
    pthread_barrier_init(&start, NULL, (unsigned)threads);
    for (int i = 0; i < threads; i++) {
      ns[i] = i;
      pthread_create(&ids[i], NULL, work, &ns[i]);
    }
    for (int i = 0; i < threads; i++) {
      pthread_join(ids[i], NULL);
      sum += ns[i];
    }
    pthread_barrier_destroy(&start);
    printf("%.2f\n", sum / threads);
    fflush(stdout);
  }
  return 0;
}
