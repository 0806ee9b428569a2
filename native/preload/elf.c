#include "elf.h"

#include <string.h>

struct tables {
  const ElfW(Sym) * symbols;
  const char *names;
  const u32 *gnu;
  const u32 *sysv;
};

/* glibc relocates these addresses in place, except where it cannot write. */
static const void *table(uintptr_t base, uintptr_t at) {
  return (const void *)(at < base ? base + at : at);
}

static struct tables tables_of(uintptr_t base, const ElfW(Dyn) * dynamic) {
  struct tables t = {0, 0, 0, 0};
  for (const ElfW(Dyn) *d = dynamic; d && d->d_tag != DT_NULL; d++) {
    const void *at = table(base, d->d_un.d_ptr);
    if (d->d_tag == DT_SYMTAB) t.symbols = at;
    if (d->d_tag == DT_STRTAB) t.names = at;
    if (d->d_tag == DT_GNU_HASH) t.gnu = at;
    if (d->d_tag == DT_HASH) t.sysv = at;
  }
  return t;
}

static void *value_of(uintptr_t base, const struct tables *t, u32 i, const char *name) {
  const ElfW(Sym) *s = t->symbols + i;
  unsigned type = s->st_info & 15, bind = s->st_info >> 4;
  if (s->st_shndx == SHN_UNDEF || s->st_value == 0 || type != STT_FUNC) return 0;
  if (bind != STB_GLOBAL && bind != STB_WEAK) return 0;
  return strcmp(t->names + s->st_name, name) ? 0 : (void *)(base + s->st_value);
}

static void *by_gnu_hash(uintptr_t base, const struct tables *t, const char *name) {
  u32 buckets = t->gnu[0], first = t->gnu[1], words = t->gnu[2], h = 5381;
  const ElfW(Addr) *bloom = (const ElfW(Addr) *)(const void *)(t->gnu + 4);
  const u32 *bucket = (const u32 *)(const void *)(bloom + words), *chain = bucket + buckets;
  if (!buckets) return 0;
  for (const char *c = name; *c; c++) h = h * 33 + (u8)*c;
  for (u32 i = bucket[h % buckets]; i >= first; i++) {
    u32 there = chain[i - first];
    if ((there | 1) == (h | 1)) {
      void *value = value_of(base, t, i, name);
      if (value) return value;
    }
    if (there & 1) break;
  }
  return 0;
}

void *ncp_elf_symbol(uintptr_t base, const ElfW(Dyn) * dynamic, const char *name) {
  struct tables t = tables_of(base, dynamic);
  if (!t.symbols || !t.names) return 0;
  if (t.gnu) return by_gnu_hash(base, &t, name);
  for (u32 i = 0; t.sysv && i < t.sysv[1]; i++) {
    void *value = value_of(base, &t, i, name);
    if (value) return value;
  }
  return 0;
}

static void describe(const struct dl_phdr_info *info, struct ncp_object *o) {
  o->base = info->dlpi_addr;
  o->name = info->dlpi_name;
  o->lo = UINTPTR_MAX;
  o->hi = 0;
  o->dynamic = 0;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const ElfW(Phdr) *p = info->dlpi_phdr + i;
    uintptr_t at = o->base + p->p_vaddr;
    if (p->p_type == PT_DYNAMIC) o->dynamic = (const ElfW(Dyn) *)at;
    if (p->p_type != PT_LOAD) continue;
    if (at < o->lo) o->lo = at;
    if (at + p->p_memsz > o->hi) o->hi = at + p->p_memsz;
  }
}

struct search {
  uintptr_t address;
  const char *name;
  int order, after;
  struct ncp_object *found;
  void *value;
};

static int holds(struct dl_phdr_info *info, size_t size, void *data) {
  (void)size;
  struct search *s = data;
  struct ncp_object o;
  describe(info, &o);
  o.order = s->order++;
  if (s->address < o.lo || s->address >= o.hi) return 0;
  *s->found = o;
  return 1;
}

int ncp_elf_object(uintptr_t address, struct ncp_object *found) {
  struct search s = {.address = address, .found = found};
  return dl_iterate_phdr(holds, &s);
}

static int count(struct dl_phdr_info *info, size_t size, void *data) {
  (void)info;
  (void)size;
  ++*(int *)data;
  return 0;
}

int ncp_elf_count(void) {
  int n = 0;
  dl_iterate_phdr(count, &n);
  return n;
}

static int defines(struct dl_phdr_info *info, size_t size, void *data) {
  (void)size;
  struct search *s = data;
  struct ncp_object o;
  int order = s->order++;
  if (order <= s->after) return 0;
  describe(info, &o);
  s->value = ncp_elf_symbol(o.base, o.dynamic, s->name);
  if (!s->value) return 0;
  s->after = order;
  return 1;
}

void *ncp_elf_next(const char *name, int *order) {
  struct search s = {.name = name, .after = *order};
  dl_iterate_phdr(defines, &s);
  *order = s.after;
  return s.value;
}
