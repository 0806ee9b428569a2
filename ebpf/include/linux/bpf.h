/* BCC brings its own copy of the BPF interface and includes it first. */
#include <linux/types.h>
