#include <asm/ptrace.h>
