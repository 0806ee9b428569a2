/* The real functions: which copy of NCCL a caller means, and what it has.
 *
 * A name that this library exports stands for what the caller would have got
 * without it: the next definition in the global scope, else the one in the
 * caller's own scope, else the library by its name. Nothing here runs after the
 * first call of a function from an object. */
#include <dlfcn.h>
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "file.h"
#include "real.h"

#define BINDINGS 1024

struct ncp_copy ncp_copies[NCP_SHM_COPIES];
const struct ncp_binding *ncp_bindings[NCP_API_MAX + 1];
void *(*ncp_real_dlsym)(void *, const char *);
void *(*ncp_real_dlvsym)(void *, const char *, const char *);

static void *(*real_dlopen)(const char *, int);
static int (*real_dlclose)(void *);
static int (*real_dladdr1)(const void *, Dl_info *, void **, int);
static char *(*real_dlerror)(void);
static struct ncp_object self;

static struct ncp_binding pool[BINDINGS];
static u32 pool_used;
static u32 busy; /* a copy is being entered */
static __thread int binding __attribute__((tls_model("initial-exec")));
static int first_objects; /* loaded with the program */
static u32 copies_used, copies_refused;
static struct ncp_shm_copy notes[NCP_SHM_COPIES]; /* for the file */

/* This library defines dlsym, so it must be found without dlsym. What other
 * libraries in LD_PRELOAD define comes before libc's. */
void ncp_real_init(void) {
  if (ncp_load(&ncp_real_dlsym)) return;
  int order;
  ncp_elf_object((uintptr_t)&ncp_real_init, &self);
#define FIND(pointer, name) \
  order = self.order, *(void **)(void *)&(pointer) = ncp_elf_next(name, &order)
  FIND(real_dlopen, "dlopen");
  FIND(real_dlclose, "dlclose");
  FIND(real_dladdr1, "dladdr1");
  FIND(real_dlerror, "dlerror");
  FIND(ncp_real_dlvsym, "dlvsym");
  void *(*found)(void *, const char *);
  FIND(found, "dlsym");
  ncp_store(&ncp_real_dlsym, found);
}

__attribute__((constructor)) static void count_objects(void) {
  ncp_real_init();
  first_objects = ncp_elf_count();
}

int ncp_is_ours(const void *address) {
  return (uintptr_t)address >= self.lo && (uintptr_t)address < self.hi;
}

int ncp_comes_before_us(uintptr_t from) {
  struct ncp_object o;
  return ncp_elf_object(from, &o) && o.order < self.order;
}

/* The next definition after this library, in the order of the global scope. */
__attribute__((noinline)) void *ncp_next_global(const char *name) {
  void *found = ncp_real_dlsym ? ncp_real_dlsym(RTLD_NEXT, name) : 0;
  __asm__ volatile("" : "+r"(found)); /* no tail call: dlsym looks at who called */
  return ncp_is_ours(found) ? 0 : found;
}

static void *in_object(const char *file, const char *name) {
  void *handle = real_dlopen ? real_dlopen(file, RTLD_LAZY | RTLD_NOLOAD) : 0;
  if (!handle) return 0;
  void *found = ncp_real_dlsym(handle, name);
  real_dlclose(handle);
  return ncp_is_ours(found) ? 0 : found;
}

/* What the caller finds in its own scope. */
void *ncp_own_scope(const char *name, const struct ncp_object *caller) {
  return caller->name[0] ? in_object(caller->name, name) : 0;
}

/* A definition in any object at all, as of a copy inside another library. */
static void *anywhere(const char *name) {
  void *found = 0;
  for (int order = -1; (found = ncp_elf_next(name, &order)) && ncp_is_ours(found);) {
  }
  return found;
}

static u32 version_of(const struct link_map *map) {
  int version = 0;
  int (*get)(int *);
  *(void **)(void *)&get = ncp_elf_symbol(map->l_addr, map->l_ld, "ncclGetVersion");
  return get && get(&version) == 0 && version > 0 ? (u32)version : 0;
}

static u32 form_of(u32 version) {
  u32 minor = version < 10000 ? version / 100 % 10 : version / 100 % 100;
  u32 major = version < 10000 ? version / 1000 : version / 10000;
  if (!version || major > 2 || (major == 2 && minor >= 26)) return 3;
  return major == 2 && minor >= 18 ? 2 : 1;
}

static void note(u32 i, const struct link_map *map) {
  struct ncp_shm_copy *n = &notes[i];
  struct ncp_stat st = {0, 0, 0, 0, 0};
  const char *path = map->l_name;
  n->base = map->l_addr;
  if (path && path[0]) {
    size_t k = 0;
    if (path[0] != '/' && getcwd(n->path, sizeof(n->path) - 1)) {
      k = strlen(n->path);
      n->path[k++] = '/';
    }
    for (; *path && k < sizeof(n->path) - 1; path++) n->path[k++] = *path;
    n->path[k] = 0;
  } else if (readlink("/proc/self/exe", n->path, sizeof(n->path) - 1) < 0) {
    n->path[0] = 0;
  }
  if (ncp_stat_at(-100 /* AT_FDCWD */, n->path, 0, &st) == 0) {
    n->dev = st.dev;
    n->ino = st.ino;
  }
  n->version = version_of(map);
  n->hash_form = form_of(n->version);
  ncp_file_layout(n, st.size);
  /* Pinned, as its functions are remembered, unless it came with the program. */
  struct ncp_object object;
  int stays = ncp_elf_object(map->l_addr, &object) && object.order < first_objects;
  if (!stays && map->l_name && map->l_name[0] && real_dlopen)
    real_dlopen(map->l_name, RTLD_LAZY | RTLD_NOLOAD);
}

static int same(u32 i, const struct link_map *map) {
  const struct ncp_copy *c = &ncp_copies[i];
  return ncp_load(&c->ready) && c->base == map->l_addr &&
         (!map->l_name || strncmp(c->name, map->l_name, sizeof(c->name) - 1) == 0);
}

static u32 find(const struct link_map *map) {
  for (u32 i = 0; i < NCP_SHM_COPIES; i++)
    if (same(i, map)) return i;
  return NCP_NO_COPY;
}

/* Copies are entered one at a time; only where a copy is met for the first time. */
static int enter_copies(void) {
  for (int n = 0; __atomic_exchange_n(&busy, 1, __ATOMIC_ACQ_REL); n++) {
    if (n > 20000) { /* held by a thread that a fork left behind */
      ncp_store(&busy, 0u);
      return 0;
    }
    usleep(100);
  }
  return 1;
}

static void publish(u32 i) {
  struct ncp_shm_copy *to = &ncp_shm->copy[i], with = notes[i];
  with.rank_at = 0;
  *to = with;
  ncp_store(&to->rank_at, notes[i].rank_at);
  ncp_store(&ncp_shm->copies, i + 1);
}

/* Copies known so far, into a file that was just made; from here on, as they come. */
void ncp_publish_copies(void) {
  int held = enter_copies();
  for (u32 i = 0; i < ncp_load(&copies_used); i++) publish(i);
  ncp_store(&ncp_state->alive, (u64)1);
  if (held) ncp_store(&busy, 0u);
}

/* The number of the copy that a function belongs to. */
u32 ncp_register(void *function) {
  Dl_info info;
  struct link_map *map = 0;
  if (!real_dladdr1 || !real_dladdr1(function, &info, (void **)&map, RTLD_DL_LINKMAP) || !map)
    return NCP_NO_COPY;
  u32 i = find(map);
  if (i != NCP_NO_COPY) return i;
  static __thread int inside __attribute__((tls_model("initial-exec")));
  if (inside) return NCP_NO_COPY; /* in a signal handler */
  if (!enter_copies()) return NCP_NO_COPY;
  inside = 1;
  i = find(map);
  if (i == NCP_NO_COPY && copies_used < NCP_SHM_COPIES) {
    i = copies_used;
    note(i, map);
    ncp_copies[i].base = map->l_addr;
    for (size_t k = 0; map->l_name && map->l_name[k] && k < sizeof(ncp_copies[i].name) - 1; k++)
      ncp_copies[i].name[k] = map->l_name[k];
    ncp_copies[i].hash_form = notes[i].hash_form;
    if (ncp_state && ncp_load(&ncp_state->alive)) publish(i);
    ncp_store(&ncp_copies[i].ready, 1u);
    ncp_store(&copies_used, i + 1);
  } else if (i == NCP_NO_COPY) {
    ncp_add(&copies_refused, 1);
    if (ncp_state && ncp_load(&ncp_state->alive)) ncp_store(&ncp_shm->unwrapped, (u64)copies_refused);
  }
  inside = 0;
  ncp_store(&busy, 0u);
  return i;
}

void ncp_real_after_fork(void) { busy = 0; }

/* A call that is not recorded, as its copy of NCCL has no number. */
void ncp_untraced(struct ncp_thread *th, u32 copy) {
  if (copy == NCP_NO_COPY && th && !th->inside) ncp_poke(&th->slot->lost, th->slot->lost + 1);
}

int ncp_missing(void) { return 2; /* ncclSystemError */ }

/* For this one call: its binding is not kept. */
static const struct ncp_binding *only_now(void *real, u32 copy) {
  static __thread struct ncp_binding once __attribute__((tls_model("initial-exec")));
  once = (struct ncp_binding){real, 0, 0, copy, 0};
  return &once;
}

static const struct ncp_binding *keep(unsigned api, void *real, u32 copy, uintptr_t lo, uintptr_t span) {
  u32 at = __atomic_fetch_add(&pool_used, 1, __ATOMIC_RELAXED);
  if (at >= BINDINGS) {
    __atomic_fetch_sub(&pool_used, 1, __ATOMIC_RELAXED);
    return only_now(real, copy);
  }
  struct ncp_binding *b = &pool[at];
  *b = (struct ncp_binding){real, lo, span, copy, ncp_load(&ncp_bindings[api])};
  while (!__atomic_compare_exchange_n(&ncp_bindings[api], &b->next, b, 0, __ATOMIC_ACQ_REL,
                                      __ATOMIC_ACQUIRE)) {
  }
  return b;
}

static const struct ncp_binding *bind(unsigned api, uintptr_t from, struct ncp_thread *th) {
  const char *name = ncp_names[api];
  struct ncp_object caller;
  int known = ncp_elf_object(from, &caller);
  uintptr_t lo = known ? caller.lo : from, span = known ? caller.hi - caller.lo : 1;
  void *real = ncp_next_global(name);
  if (real) {
    lo = 0;
    span = UINTPTR_MAX;
  } else if (known && caller.order == self.order && th && th->inside) {
    /* NCCL left its own call by a jump: the copy that the thread is in. */
    const struct ncp_copy *c = &ncp_copies[th->copy];
    if (th->copy < NCP_SHM_COPIES && c->real[api]) real = c->real[api];
  }
  if (!real && known) real = ncp_own_scope(name, &caller);
  if (!real) real = in_object("libnccl.so.2", name);
  if (!real) real = anywhere(name);
  if (real_dlerror) real_dlerror(); /* what was tried is no error of the program's */
  if (real) {
    u32 copy = ncp_register(real);
    /* Kept when it is final: known, or one too many. */
    return copy != NCP_NO_COPY || ncp_load(&copies_refused) ? keep(api, real, copy, lo, span)
                                                            : only_now(real, NCP_NO_COPY);
  }
  static u32 said;
  if (!__atomic_exchange_n(&said, 1, __ATOMIC_RELAXED))
    ncp_say(name, "is in no loaded copy of NCCL; the call fails");
  void *missing;
  *(int (**)(void)) & missing = ncp_missing;
  return only_now(missing, NCP_MISSING);
}

const struct ncp_binding *ncp_bind(unsigned api, uintptr_t from, struct ncp_thread *th) {
  for (const struct ncp_binding *b = ncp_load(&ncp_bindings[api]); b; b = b->next)
    if (from - b->lo < b->span) return b;
  int saved = errno;
  const struct ncp_binding *b;
  ncp_real_init();
  if (binding) { /* a signal handler came between: nothing that takes a lock */
    void *real = anywhere(ncp_names[api]);
    if (!real) *(int (**)(void)) & real = ncp_missing;
    b = only_now(real, NCP_NO_COPY);
  } else {
    binding = 1;
    b = bind(api, from, th);
    binding = 0;
  }
  errno = saved;
  return b;
}
