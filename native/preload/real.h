/* Finding real functions; see real.c. */
#ifndef NCP_REAL_H
#define NCP_REAL_H

#include "elf.h"

NCP_HIDDEN void ncp_real_init(void);
NCP_HIDDEN int ncp_is_ours(const void *address);
NCP_HIDDEN int ncp_comes_before_us(uintptr_t from);
NCP_HIDDEN void *ncp_next_global(const char *name);
NCP_HIDDEN void *ncp_own_scope(const char *name, const struct ncp_object *caller);

#endif
