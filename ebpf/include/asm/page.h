/* BCC sizes a ring buffer in pages of this size; the loader says what it is. */
#ifndef NCP_STUB_PAGE_H
#define NCP_STUB_PAGE_H
#ifndef PAGE_SIZE
#define PAGE_SIZE 4096
#endif
#endif
