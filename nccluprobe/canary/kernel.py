"""The local add of the two-rank all-reduce: PTX, loaded through the driver.

PTX ISA 6.0 for sm_70, so that any driver and GPU of use today compiles it.
sm_70 has no bfloat16 arithmetic: the values are widened to float32, added, and
rounded to nearest even in integers; a NaN stays a NaN.
"""

from __future__ import annotations

from nccluprobe.canary.cuda import Cuda

#: Datatype (by its name) to kernel. out[i] = a[i] + b[i] for i < n, all 64-bit parameters.
ADD_KERNELS = {"float32": "ncp_add_f32", "bfloat16": "ncp_add_bf16"}

_BLOCK = 256
_MAX_GRID = 1024

_ENTRY = """
.visible .entry {name}(
    .param .u64 p_out, .param .u64 p_a, .param .u64 p_b, .param .u64 p_n)
{{
    .reg .pred %p<3>;
    .reg .b16 %h<4>;
    .reg .b32 %r<16>;
    .reg .f32 %f<4>;
    .reg .b64 %rd<16>;

    ld.param.u64 %rd1, [p_out];
    ld.param.u64 %rd2, [p_a];
    ld.param.u64 %rd3, [p_b];
    ld.param.u64 %rd4, [p_n];
    cvta.to.global.u64 %rd1, %rd1;
    cvta.to.global.u64 %rd2, %rd2;
    cvta.to.global.u64 %rd3, %rd3;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mov.u32 %r4, %nctaid.x;
    mul.wide.u32 %rd5, %r1, %r2;
    cvt.u64.u32 %rd6, %r3;
    add.s64 %rd5, %rd5, %rd6;
    mul.wide.u32 %rd7, %r4, %r2;
NEXT:
    setp.ge.u64 %p1, %rd5, %rd4;
    @%p1 bra DONE;
    shl.b64 %rd8, %rd5, {shift};
    add.s64 %rd9, %rd1, %rd8;
    add.s64 %rd10, %rd2, %rd8;
    add.s64 %rd11, %rd3, %rd8;
{body}
    add.s64 %rd5, %rd5, %rd7;
    bra NEXT;
DONE:
    ret;
}}
"""

_F32 = """\
    ld.global.f32 %f1, [%rd10];
    ld.global.f32 %f2, [%rd11];
    add.rn.f32 %f3, %f1, %f2;
    st.global.f32 [%rd9], %f3;"""

_BF16 = """\
    ld.global.u16 %h1, [%rd10];
    ld.global.u16 %h2, [%rd11];
    cvt.u32.u16 %r5, %h1;
    cvt.u32.u16 %r6, %h2;
    shl.b32 %r5, %r5, 16;
    shl.b32 %r6, %r6, 16;
    mov.b32 %f1, %r5;
    mov.b32 %f2, %r6;
    add.rn.f32 %f3, %f1, %f2;
    mov.b32 %r7, %f3;
    shr.u32 %r8, %r7, 16;
    and.b32 %r9, %r8, 1;
    add.u32 %r10, %r7, 32767;
    add.u32 %r10, %r10, %r9;
    shr.u32 %r10, %r10, 16;
    or.b32 %r11, %r8, 64;
    setp.nan.f32 %p2, %f3, %f3;
    selp.b32 %r12, %r11, %r10, %p2;
    cvt.u16.u32 %h3, %r12;
    st.global.u16 [%rd9], %h3;"""

PTX = (
    ".version 6.0\n.target sm_70\n.address_size 64\n"
    + _ENTRY.format(name=ADD_KERNELS["float32"], shift=2, body=_F32)
    + _ENTRY.format(name=ADD_KERNELS["bfloat16"], shift=1, body=_BF16)
).encode()


class AddKernels:
    """The loaded add kernels of one device."""

    def __init__(self, cuda: Cuda, image: bytes = PTX) -> None:
        """Loads `image`; CudaError when the driver refuses it or lacks an entry."""
        self._cuda = cuda
        self._module = cuda.module(image)
        self._functions = {
            dtype: cuda.function(self._module, name) for dtype, name in ADD_KERNELS.items()
        }

    def add(self, dtype: str, out: int, a: int, b: int, count: int, stream: int) -> None:
        """Queues out[i] = a[i] + b[i] for `count` elements; `out` may be `a` or `b`."""
        grid = min(_MAX_GRID, max(1, (count + _BLOCK - 1) // _BLOCK))
        self._cuda.launch(self._functions[dtype], grid, _BLOCK, [out, a, b, count], stream)

    def unload(self) -> None:
        if self._module:
            module, self._module = self._module, 0
            self._cuda.module_unload(module)
