/* What differs between x86-64 and aarch64 besides the places of arguments. */
#ifndef NCP_ARCH_H
#define NCP_ARCH_H

#if defined(__x86_64__)

#define ncp_sp(ctx) ((u64)(ctx)->sp)
#define ncp_ip(ctx) ((u64)(ctx)->ip)
#define ncp_rc(ctx) ((s32)(ctx)->ax)
#define ncp_arg0(ctx) ((u64)(ctx)->di)
/* The return address is popped: sp at the exit less sp at the entry. */
#define NCP_RETURN_POPS 8

#else

#define ncp_sp(ctx) ((u64)(ctx)->sp)
#define ncp_ip(ctx) ((u64)(ctx)->pc)
#define ncp_rc(ctx) ((s32)(ctx)->regs[0])
#define ncp_arg0(ctx) ((u64)(ctx)->regs[0])
#define NCP_RETURN_POPS 0

#endif
#endif
