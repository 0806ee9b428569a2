/* dlsym and dlvsym: programs that look NCCL's functions up get wrappers.
 *
 * For any name but those of the API table both leave everything as it was and
 * jump to the real function, with the caller's return address in place: what
 * RTLD_NEXT and RTLD_DEFAULT mean depends on it. */
#include <dlfcn.h>
#include <string.h>

#include "real.h"

struct answer {
  void *value;
  long given; /* 0: ask the real one */
};

NCP_HIDDEN struct answer ncp_dlsym_hook(void *handle, const char *name, uintptr_t from);
NCP_HIDDEN struct answer ncp_dlvsym_hook(void *handle, const char *name, const char *version,
                                         uintptr_t from);

static const struct answer ask = {0, 0};

static unsigned id_of(const char *name) {
  for (unsigned api = 1; api <= NCP_API_MAX; api++)
    if (ncp_names[api] && strcmp(ncp_names[api], name) == 0) return api;
  return 0;
}

/* The wrapper of a real function; the function itself when there are more copies
 * than sets of wrappers. */
static void *wrapped(unsigned api, void *real) {
  u32 copy = ncp_register(real);
  if (copy >= NCP_SHM_COPIES) return real;
  ncp_store(&ncp_copies[copy].real[api], real);
  return ncp_sets[copy][api];
}

/* RTLD_DEFAULT without this library: the global scope, then the caller's. */
static void *by_default(const char *name, uintptr_t from) {
  void *found = ncp_next_global(name);
  struct ncp_object caller;
  if (!found && from && ncp_elf_object(from, &caller)) found = ncp_own_scope(name, &caller);
  return found;
}

static struct answer answer(void *real, unsigned api) {
  struct answer a = {0, 1};
  if (real)
    a.value = wrapped(api, real);
  else
    ncp_next_global(ncp_names[api]); /* for dlerror */
  return a;
}

struct answer ncp_dlsym_hook(void *handle, const char *name, uintptr_t from) {
  ncp_real_init();
  if (!name || strncmp(name, "nccl", 4) != 0) return ask;
  unsigned api = id_of(name);
  if (!api || !ncp_real_dlsym) return ask;
  if (handle == RTLD_DEFAULT) return answer(by_default(name, from), api);
  if (handle == RTLD_NEXT)
    return ncp_comes_before_us(from) ? answer(ncp_next_global(name), api) : ask;
  void *found = ncp_real_dlsym(handle, name);
  if (!found) return (struct answer){0, 1};
  /* The program's own scope: this library is in it. */
  if (ncp_is_ours(found)) found = ncp_next_global(name);
  return answer(found, api);
}

struct answer ncp_dlvsym_hook(void *handle, const char *name, const char *version, uintptr_t from) {
  ncp_real_init();
  if (!name || strncmp(name, "nccl", 4) != 0) return ask;
  unsigned api = id_of(name);
  if (!api || !ncp_real_dlvsym || handle == RTLD_NEXT) return ask;
  if (handle == RTLD_DEFAULT) return answer(by_default(name, from), api);
  void *found = ncp_real_dlvsym(handle, name, version);
  if (!found) return (struct answer){0, 1};
  if (ncp_is_ours(found)) found = ncp_next_global(name);
  return answer(found, api);
}

#if defined(NCP_NO_DLSYM) /* sanitizers look their functions up before we can */
#elif defined(__x86_64__)
#define ENTRY(name, hook, real, from) \
  __asm__(".text\n.p2align 4\n.globl " name "\n.type " name ", @function\n" name ":\n" \
          ".cfi_startproc\n" \
          "  .byte 0xf3, 0x0f, 0x1e, 0xfa\n" /* endbr64 */ \
          "  pushq %rdi\n  .cfi_adjust_cfa_offset 8\n" \
          "  pushq %rsi\n  .cfi_adjust_cfa_offset 8\n" \
          "  pushq %rdx\n  .cfi_adjust_cfa_offset 8\n" \
          "  movq 24(%rsp), " from "\n" \
          "  call " hook "\n" \
          "  movq %rdx, %rcx\n" \
          "  popq %rdx\n  .cfi_adjust_cfa_offset -8\n" \
          "  popq %rsi\n  .cfi_adjust_cfa_offset -8\n" \
          "  popq %rdi\n  .cfi_adjust_cfa_offset -8\n" \
          "  testq %rcx, %rcx\n" \
          "  jne 1f\n" \
          "  movq " real "(%rip), %rax\n" \
          "  testq %rax, %rax\n" \
          "  je 1f\n" \
          "  jmpq *%rax\n" \
          "1: ret\n" \
          ".cfi_endproc\n.size " name ", . - " name "\n")
ENTRY("dlsym", "ncp_dlsym_hook", "ncp_real_dlsym", "%rdx");
ENTRY("dlvsym", "ncp_dlvsym_hook", "ncp_real_dlvsym", "%rcx");
#elif defined(__aarch64__)
#define ENTRY(name, hook, real, from) \
  __asm__(".text\n.p2align 4\n.globl " name "\n.type " name ", %function\n" name ":\n" \
          ".cfi_startproc\n" \
          "  hint #34\n" /* bti c */ \
          "  stp x29, x30, [sp, #-48]!\n" \
          "  .cfi_def_cfa_offset 48\n  .cfi_offset 29, -48\n  .cfi_offset 30, -40\n" \
          "  mov x29, sp\n" \
          "  stp x0, x1, [sp, #16]\n" \
          "  str x2, [sp, #32]\n" \
          "  mov " from ", x30\n" \
          "  bl " hook "\n" \
          "  mov x9, x0\n" \
          "  mov x10, x1\n" \
          "  ldp x0, x1, [sp, #16]\n" \
          "  ldr x2, [sp, #32]\n" \
          "  ldp x29, x30, [sp], #48\n" \
          "  .cfi_restore 29\n  .cfi_restore 30\n  .cfi_def_cfa_offset 0\n" \
          "  cbnz x10, 1f\n" \
          "  adrp x16, " real "\n" \
          "  ldr x16, [x16, #:lo12:" real "]\n" \
          "  mov x9, xzr\n" \
          "  cbz x16, 1f\n" \
          "  br x16\n" \
          "1: mov x0, x9\n" \
          "  ret\n" \
          ".cfi_endproc\n.size " name ", . - " name "\n")
ENTRY("dlsym", "ncp_dlsym_hook", "ncp_real_dlsym", "x2");
ENTRY("dlvsym", "ncp_dlvsym_hook", "ncp_real_dlvsym", "x3");
#else
#error "x86-64 or aarch64"
#endif
