/* Registers of the traced thread, as a uprobe program gets them. */
#ifndef NCP_STUB_PTRACE_H
#define NCP_STUB_PTRACE_H

#if defined(__x86_64__)

struct pt_regs {
  unsigned long r15, r14, r13, r12, bp, bx;
  unsigned long r11, r10, r9, r8;
  unsigned long ax, cx, dx, si, di;
  unsigned long orig_ax, ip, cs, flags, sp, ss;
};

#elif defined(__aarch64__)

struct user_pt_regs {
  unsigned long long regs[31];
  unsigned long long sp, pc, pstate;
};
struct pt_regs {
  union {
    struct user_pt_regs user_regs;
    struct {
      unsigned long long regs[31];
      unsigned long long sp, pc, pstate;
    };
  };
};

#else
#error "nccluprobe traces x86-64 and aarch64"
#endif
#endif
