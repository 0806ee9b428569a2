/* Symbols of loaded objects, read from their own tables: needed to find the real
 * dlsym, as this library defines one itself, and without symbol versions that
 * only a new glibc has. */
#ifndef NCP_ELF_H
#define NCP_ELF_H

#include <link.h>

#include "preload.h"

/* A loaded object: where, and what its dynamic section says. */
struct ncp_object {
  uintptr_t base, lo, hi; /* its mapping is within [lo, hi) */
  const ElfW(Dyn) * dynamic;
  const char *name;
  int order; /* among the objects loaded at the start, 0: the program */
};

/* The address of a function that the object defines; 0 when it does not. */
NCP_HIDDEN void *ncp_elf_symbol(uintptr_t base, const ElfW(Dyn) * dynamic, const char *name);
/* The object that an address lies in. */
NCP_HIDDEN int ncp_elf_object(uintptr_t address, struct ncp_object *found);
/* How many objects are loaded. */
NCP_HIDDEN int ncp_elf_count(void);
/* The first definition in an object loaded after `order`, the order of which is
 * written to it. */
NCP_HIDDEN void *ncp_elf_next(const char *name, int *order);

#endif
