/* BCC's macros name this function; the program does not. */
#ifndef NCP_STUB_LOG2_H
#define NCP_STUB_LOG2_H
#define roundup_pow_of_two(n) (1UL << (64 - __builtin_clzl((n) - 1)))
#endif
