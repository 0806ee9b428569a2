/* Forced in first by BCC. The stub headers replace the kernel's: the program
 * uses BPF helpers and the user's registers only, never a kernel structure, so
 * it compiles to the same code on every machine, with no kernel headers there. */
#ifndef NCP_STUB_KCONFIG_H
#define NCP_STUB_KCONFIG_H
#define CONFIG_BPF_SYSCALL 1
#endif
