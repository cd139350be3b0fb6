"""The emulated CUDA device: kernels written here with results known by NumPy, and each fault that it must find, planted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trueup.backends.cuda.driver import CudaError
from trueup.backends.simt.driver import CompileError, Driver

CUDA = Callable[..., Any]

REDUCTIONS = r"""
#define WARPS 8
#define SHARED(T, name, n) __shared__ T name[n]

__device__ __forceinline__ float warp_sum(float v)
{
#pragma unroll
    for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(0xffffffffu, v, d);
    return v;
}

// One row a block: y[row] is the sum, m[row] the largest, c[row] how many are above 0.
extern "C" __global__ void __launch_bounds__(256) reduce(const float *__restrict__ x, float *y, float *m, int *c, int n)
{
    SHARED(float, sums, WARPS);
    SHARED(float, largest, WARPS);
    const float *row = x + (size_t)blockIdx.x * n;
    float s = 0, g = __int_as_float(0xff800000);
    int above = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        s += __ldg(row + i);
        g = fmaxf(g, row[i]);
        above += row[i] > 0;
    }
    s = warp_sum(s);
    for (int d = 16; d; d >>= 1) g = fmaxf(g, __shfl_down_sync(0xffffffffu, g, d));
    above = __reduce_add_sync(0xffffffffu, above);
    const int w = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (!lane) sums[w] = s, largest[w] = g;
    __shared__ int total;
    if (!threadIdx.x) total = 0;
    __syncthreads();
    if (!lane) atomicAdd(&total, above);
    __syncthreads();
    if (threadIdx.x == 0) {
        float all = 0, most = largest[0];
        for (int i = 0; i < WARPS; i++) all += sums[i], most = fmaxf(most, largest[i]);
        y[blockIdx.x] = all, m[blockIdx.x] = most, c[blockIdx.x] = total;
    }
}

// An inclusive scan of one block's values, by doubling in dynamic shared memory: barriers in a loop.
extern __shared__ __align__(16) int both[];
extern "C" __global__ void scan(const int *x, int *y)
{
    int *from = both, *to = both + blockDim.x;
    from[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
    for (int d = 1; d < blockDim.x; d *= 2) {
        __syncthreads();
        to[threadIdx.x] = from[threadIdx.x] + (threadIdx.x >= d ? from[threadIdx.x - d] : 0);
        int *t = from; from = to; to = t;
    }
    y[blockIdx.x * blockDim.x + threadIdx.x] = from[threadIdx.x];
}

template <int TILE> __device__ void tiled(const float *a, const float *b, float *c, int n)
{
    __shared__ float at[TILE][TILE + 1], bt[TILE][TILE + 1];
    const int x = threadIdx.x, y = threadIdx.y, col = blockIdx.x * TILE + x, row = blockIdx.y * TILE + y;
    float sum = 0;
    for (int k = 0; k < n; k += TILE) {
        at[y][x] = row < n && k + x < n ? a[row * n + k + x] : 0;
        bt[y][x] = col < n && k + y < n ? b[(k + y) * n + col] : 0;
        __syncthreads();
        for (int i = 0; i < TILE; i++) sum += at[y][i] * bt[i][x];
        __syncthreads();
    }
    if (row < n && col < n) c[row * n + col] = sum;
}
extern "C" __global__ void matmul(const float *a, const float *b, float *c, int n) { tiled<16>(a, b, c, n); }

// What each lane gets from ballots and shuffles of part of a warp.
extern "C" __global__ void lanes(unsigned *out)
{
    const unsigned lane = threadIdx.x;
    out[lane] = __ballot_sync(0xffffffffu, lane % 3 == 0);
    out[32 + lane] = __shfl_sync(0xffffffffu, lane, (lane + 5) % 8, 8);
    out[64 + lane] = __shfl_up_sync(0xffffffffu, lane, 1u);
    if (lane < 16) out[96 + lane] = __shfl_down_sync(0xffffu, lane * 10, 1, 16);
    else out[96 + lane] = __any_sync(0xffff0000u, lane == 20) + 2 * __all_sync(0xffff0000u, lane == 20);
    out[128 + lane] = __match_any_sync(0xffffffffu, lane / 8);
    out[160 + lane] = __reduce_max_sync(0xffffffffu, (int)lane - 40) + __reduce_min_sync(0xffffffffu, lane + 3);
    const double half = __shfl_sync(0xffffffffu, lane / 2.0, 3);
    out[192 + lane] = (unsigned)(half * 2) + __popc(__byte_perm(0x01020304u, 0x05060708u, 0x7410u)) + __clz(lane) + __ffs(lane);
}

// The last block to finish adds up what all have left.
extern "C" __global__ void last_adds(const float *x, float *parts, unsigned *count, float *y)
{
    __shared__ bool last;
    const float s = warp_sum(x[blockIdx.x * 32 + threadIdx.x]);
    if (!threadIdx.x) {
        parts[blockIdx.x] = s;
        __threadfence();
        last = atomicInc(count, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncwarp();
    if (last) {
        float all = 0;
        for (int i = threadIdx.x; i < gridDim.x; i += 32) all += parts[i];
        all = warp_sum(all);
        if (!threadIdx.x) *y = all;
    }
}

struct Shape { long long n; float scale; };
extern "C" __global__ void scaled(const float4 *x, float4 *y, const Shape shape, bool negate)
{
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= shape.n) return;
    const float4 v = x[i];
    const float s = negate ? -shape.scale : shape.scale;
    y[i] = make_float4(v.x * s, v.y * s, v.z * s, v.w * s);
}
"""

KINDS = [
    {},
    {"orders": (0, 1, 2, 3)},
    {"checked": True},
    {"workers": 2},
    {"checked": True, "orders": (1, 5), "workers": 2},
]


@pytest.fixture(params=KINDS, ids=["plain", "orders", "checked", "workers", "all"])
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


def normal(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_reductions_and_atomics_of_a_row(cuda: CUDA, kind: dict[str, Any]) -> None:
    x = normal(7, 1000)
    run = cuda(REDUCTIONS, **kind)
    _, y, m, c = run("reduce", x, *(np.empty(7, t) for t in "ffi"), 1000, grid=(7,), block=(256,))
    np.testing.assert_allclose(y, x.sum(1), rtol=0, atol=1e-4)
    np.testing.assert_array_equal(m, x.max(1))
    np.testing.assert_array_equal(c, (x > 0).sum(1))
    assert run.driver.used == 0


def test_a_scan_with_barriers_in_a_loop(cuda: CUDA, kind: dict[str, Any]) -> None:
    x = np.arange(1024, dtype=np.int32).reshape(4, 256)
    _, y = cuda(REDUCTIONS, **kind)("scan", x, np.empty_like(x), grid=(4,), block=(256,), shared=2048)
    np.testing.assert_array_equal(y, x.cumsum(1))


def test_tiles_in_shared_memory_of_a_template(cuda: CUDA, kind: dict[str, Any]) -> None:
    a, b = normal(37, 37), normal(37, 37, seed=1)
    *_, c = cuda(REDUCTIONS, **kind)("matmul", a, b, np.empty_like(a), 37, grid=(3, 3), block=(16, 16))
    np.testing.assert_allclose(c, a @ b, atol=1e-4)


def test_what_lanes_exchange(cuda: CUDA, kind: dict[str, Any]) -> None:
    (out,) = cuda(REDUCTIONS, **kind)("lanes", np.empty(224, np.uint32))
    ballot, shuffle, up, half, match, reduce, bits = out.reshape(7, 32)
    lane = np.arange(32)
    assert set(ballot) == {sum(1 << i for i in range(0, 32, 3))}
    np.testing.assert_array_equal(shuffle, lane // 8 * 8 + (lane + 5) % 8)
    np.testing.assert_array_equal(up, np.maximum(lane - 1, 0))
    np.testing.assert_array_equal(
        half, [10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120, 130, 140, 150, 150] + [1] * 16
    )
    np.testing.assert_array_equal(match, 0xFF << lane // 8 * 8)
    assert set(reduce.astype(np.int32)) == {31 - 40 + 3}
    # bytes 7, 4, 1 and 0 of the pair, from the top: 05, 08, 03, 04 have 2 + 1 + 2 + 1 bits set
    clz = [32 - int(i).bit_length() for i in lane]
    ffs = [(int(i) & -int(i)).bit_length() for i in lane]
    np.testing.assert_array_equal(bits, 3 + 6 + np.array(clz) + np.array(ffs))


def test_the_last_block_adds_up(cuda: CUDA, kind: dict[str, Any]) -> None:
    x = normal(50, 32)
    out = cuda(REDUCTIONS, **kind)(
        "last_adds", x, np.empty(50, np.float32), np.zeros(1, np.uint32), np.empty(1, np.float32), grid=(50,)
    )
    np.testing.assert_allclose(out[3], x.sum(), atol=1e-4)
    assert out[2][0] == 0


def test_vectors_structs_and_flags_as_arguments(cuda: CUDA, kind: dict[str, Any]) -> None:
    x = normal(75, 4)
    shape = np.zeros(1, np.dtype([("n", np.int64), ("scale", np.float32)], align=True))
    shape["n"], shape["scale"] = 75, 1.5
    _, y = cuda(REDUCTIONS, **kind)("scaled", x, np.empty_like(x), shape.tobytes(), True, grid=(3,))
    np.testing.assert_array_equal(y, x * np.float32(-1.5))


def test_a_block_that_waits_twenty_times_costs_little(cuda: CUDA) -> None:
    source = """extern "C" __global__ void wait(float *x, int rounds)
    { for (int i = 0; i < rounds; i++) { x[threadIdx.x] += 1; __syncthreads(); } }"""
    run = cuda(source)
    x = np.zeros(256, np.float32)
    best = 1.0
    for _ in range(5):
        start = time.perf_counter()
        (out,) = run("wait", x, 20, grid=(100,), block=(256,))
        best = min(best, (time.perf_counter() - start) / 100)
    assert (out == 2000).all()
    assert best < 2e-3, f"{best * 1e3:.2f} ms a block"


TENSOR_CORES = r"""
#include <cuda_bf16.h>
__device__ __forceinline__ unsigned at(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

// One tile: d = a b + c, a [16, 16] and b [16, 8] of bf16 as they lie in row-major order.
extern "C" __global__ void bf16(const uint4 *a, const uint4 *b, const float *c, float *d)
{
    __shared__ __align__(16) unsigned short as[16][16 + 8], bs[16][8];
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4 * 2;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(at(&as[lane / 2][lane % 2 * 8])), "l"(a + lane));
    if (lane < 16) asm volatile("cp.async.cg.shared.global [%0], [%1], %2;" : : "r"(at(bs[lane])), "l"(b + lane), "n"(16));
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group %0;" ::"n"(0));
    __syncwarp();
    unsigned ra[4], rb[2];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(ra[0]), "=r"(ra[1]), "=r"(ra[2]), "=r"(ra[3])
                 : "r"(at(&as[lane % 16][lane / 16 * 8])));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(rb[0]), "=r"(rb[1]) : "r"(at(bs[lane % 16])));
    float s[4] = {c[g * 8 + t], c[g * 8 + t + 1], c[(g + 8) * 8 + t], c[(g + 8) * 8 + t + 1]};
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3])
                 : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1]));
    d[g * 8 + t] = s[0], d[g * 8 + t + 1] = s[1], d[(g + 8) * 8 + t] = s[2], d[(g + 8) * 8 + t + 1] = s[3];
}

// a [16, 32] and b transposed, [8, 32], of bytes.
extern "C" __global__ void s8(const int *a, const int *b, int *d)
{
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    int s[4] = {};
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=r"(s[0]), "=r"(s[1]), "=r"(s[2]), "=r"(s[3])
        : "r"(a[g * 8 + t]), "r"(a[(g + 8) * 8 + t]), "r"(a[g * 8 + t + 4]), "r"(a[(g + 8) * 8 + t + 4]),
          "r"(b[g * 8 + t]), "r"(b[g * 8 + t + 4]), "r"(0), "r"(0), "r"(0), "r"(0));
    d[g * 8 + 2 * t] = s[0], d[g * 8 + 2 * t + 1] = s[1], d[(g + 8) * 8 + 2 * t] = s[2], d[(g + 8) * 8 + 2 * t + 1] = s[3];
}

extern "C" __global__ void hints(const float4 *x, float4 *y)
{
    float4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(x + threadIdx.x));
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(v.x) : "f"(v.x));
    asm volatile("st.global.cs.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(y + threadIdx.x), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w));
}
"""


def as_bf16(x: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Values that bf16 holds, as stored and as they are."""
    bits = (x.view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("kind", [{}, {"checked": True}], ids=["plain", "checked"])
def test_tensor_cores_and_asynchronous_copies(cuda: CUDA, kind: dict[str, Any]) -> None:
    run = cuda(TENSOR_CORES, **kind)
    (a, fa), (b, fb), c = as_bf16(normal(16, 16)), as_bf16(normal(16, 8, seed=1)), normal(16, 8, seed=2)
    *_, d = run("bf16", a, b, c, np.empty((16, 8), np.float32))
    np.testing.assert_allclose(d, fa @ fb + c, atol=1e-5)
    random = np.random.default_rng(3)
    x, y = (random.integers(-128, 128, (n, 32)).astype(np.int8) for n in (16, 8))
    *_, d = run("s8", x, y, np.empty((16, 8), np.int32))
    np.testing.assert_array_equal(d, x.astype(np.int32) @ y.astype(np.int32).T)
    v = normal(32, 4)
    _, w = run("hints", v, np.empty_like(v))
    np.testing.assert_allclose(w, np.concatenate([2 ** v[:, :1], v[:, 1:]], 1), rtol=1e-6)


def test_an_asynchronous_copy_that_is_not_waited_for(cuda: CUDA) -> None:
    source = TENSOR_CORES.replace('"cp.async.wait_group %0;" ::"n"(0)', '"cp.async.wait_group %0;" ::"n"(1)')
    *_, d = cuda(source)(
        "bf16", *(np.zeros((16, n), np.uint16) for n in (16, 8)), *(np.zeros((16, 8), np.float32),) * 2
    )
    assert np.isnan(d).any()


def test_ptx_that_the_emulator_does_not_know(cuda: CUDA) -> None:
    with pytest.raises(CompileError, match=r"does not know the PTX instruction wgmma.fence.sync.aligned"):
        cuda(kernel('asm volatile("wgmma.fence.sync.aligned;");'))


# -- faults, each planted ---------------------------------------------------------------------------------------------

PLAIN, CHECKED, ORDERS = {}, {"checked": True}, {"orders": (0, 1, 2)}


def fault(run: Any, *args: Any, **launch: Any) -> str:
    from emulated_cuda.driver import KernelFault

    with pytest.raises(KernelFault) as caught:
        run(*args, **launch)
    return str(caught.value)


def kernel(body: str, params: str = "float *x", before: str = "") -> str:
    return f'{before}\nextern "C" __global__ void k({params}) {{ const int t = threadIdx.x; {body} }}'


@pytest.mark.parametrize(
    ("kind", "at", "does", "says"),
    [
        (PLAIN, 4096, "x[{}] = 1", "past the end of an allocation of 400 bytes"),
        (PLAIN, -4096, "x[{}] = 1", "before an allocation of 400 bytes"),
        (PLAIN, 100, "x[{}] = 1", "bytes after an allocation of 400 bytes were overwritten"),
        (PLAIN, -1, "x[{}] = 1", "bytes before an allocation of 400 bytes were overwritten"),
        (PLAIN, 4096, "x[0] = x[{}]", "past the end of an allocation of 400 bytes"),
        (CHECKED, 100, "x[{}] = 1", "writes 4 bytes: an access 0 bytes past the end of an allocation of 400 bytes"),
        (CHECKED, 101, "x[0] = x[{}]", "reads 4 bytes: an access 4 bytes past the end"),
        (CHECKED, -1, "x[0] = x[{}]", "reads 4 bytes: an access 4 bytes before an allocation"),
        (CHECKED, 100, "atomicAdd(x + {}, 1.0f)", "writes 4 bytes: an access 0 bytes past the end"),
    ],
)
def test_global_memory_out_of_bounds(cuda: CUDA, kind: dict[str, Any], at: int, does: str, says: str) -> None:
    said = fault(cuda(kernel(f"if (t == 3) {does.format(at)};"), **kind), "k", np.zeros(100, np.float32))
    assert says in said
    assert "thread (3, 0, 0)" in said or "were overwritten" in said


def test_a_null_pointer(cuda: CUDA) -> None:
    assert "address 0x0, which is no memory of the device" in fault(cuda(kernel("x[t] = 1;")), "k", 0)


@pytest.mark.parametrize("kind", [PLAIN, CHECKED], ids=["plain", "checked"])
def test_use_after_free(cuda: CUDA, kind: dict[str, Any]) -> None:
    run = cuda(kernel("x[t] = 1;"), **kind)
    d = run.driver
    ptr = d.alloc(400)
    d.free(ptr)
    assert "that was freed" in fault(run, "k", ptr)


def test_double_free_and_strangers(cuda: CUDA) -> None:
    d = cuda(kernel("")).driver
    ptr = d.alloc(16)
    d.free(ptr)
    with pytest.raises(CudaError, match="freed twice"):
        d.free(ptr)
    with pytest.raises(CudaError, match="is no allocation"):
        d.free(12345)


def test_what_is_not_freed_is_counted(cuda: CUDA) -> None:
    d = cuda(kernel("")).driver
    a, _ = d.alloc(1000), d.alloc(24)
    d.free(a)
    assert d.used == 24


def test_no_room(cuda: CUDA) -> None:
    d = cuda(kernel(""), memory=1000).driver
    a = d.alloc(900)
    with pytest.raises(MemoryError, match=r"101 bytes, 900 of 1,000 in use"):
        d.alloc(101)
    d.free(a)
    d.alloc(1000)


@pytest.mark.parametrize("kind", [PLAIN, CHECKED], ids=["plain", "checked"])
@pytest.mark.parametrize(
    ("declared", "shared"),
    [("__shared__ float s[32];", 0), ("extern __shared__ float s[];", 128)],
    ids=["static", "dynamic"],
)
def test_shared_memory_out_of_bounds(cuda: CUDA, kind: dict[str, Any], declared: str, shared: int) -> None:
    body = f"{declared} float *p = s; s[t] = 1; __syncthreads(); if (t == 5) p[n] = 1;"
    run = cuda(kernel(body, "int n"), **kind)
    for n in (32, -1):
        said = fault(run, "k", n, shared=shared)
        assert "shared memory" in said
    run("k", 31, shared=shared)


def test_an_index_outside_of_an_array_whose_size_is_known(cuda: CUDA) -> None:
    said = fault(cuda(kernel("__shared__ float s[4][8]; s[t / 8][n] = 1;", "int n")), "k", 8)
    assert "index 8 lies outside of 'float [8]', line 2" in said


@pytest.mark.parametrize("kind", [PLAIN, CHECKED], ids=["plain", "checked"])
def test_shared_memory_that_nothing_has_written(cuda: CUDA, kind: dict[str, Any]) -> None:
    """In the second block the first one's values must not be found either."""
    body = "__shared__ float s[32]; if (!blockIdx.x) s[t] = 7; __syncthreads(); x[blockIdx.x * 32 + t] = s[t];"
    run = cuda(kernel(body), **kind)
    if kind:
        assert "block (1, 0, 0), thread (0, 0, 0): reads shared memory that nothing has written" in fault(
            run, "k", np.zeros(64, np.float32), grid=(2,)
        )
    else:
        (x,) = run("k", np.zeros(64, np.float32), grid=(2,))
        assert (x[:32] == 7).all() and np.isnan(x[32:]).all()


@pytest.mark.parametrize("kind", [PLAIN, CHECKED], ids=["plain", "checked"])
def test_memory_that_nothing_has_written(cuda: CUDA, kind: dict[str, Any]) -> None:
    run = cuda(kernel("x[t] = y[t];", "float *x, const float *y"), **kind)
    ptr = run.driver.alloc(128)
    if kind:
        assert "reads memory that nothing has written: byte 0 of an allocation of 128 bytes" in fault(
            run, "k", np.zeros(32, np.float32), ptr
        )
        run.driver.memset(ptr, 0, 128)
        run("k", np.zeros(32, np.float32), ptr)
    else:
        assert np.isnan(run("k", np.zeros(32, np.float32), ptr)[0]).all()


MISSING_BARRIER = "__shared__ float s[64]; s[t] = t; {} x[t] = s[63 - t];"


@pytest.mark.parametrize("kind", [ORDERS, CHECKED], ids=["orders", "checked"])
def test_a_missing_barrier(cuda: CUDA, kind: dict[str, Any]) -> None:
    run = cuda(kernel(MISSING_BARRIER.format("")), **kind)
    said = fault(run, "k", np.zeros(64, np.float32), block=(64,))
    assert "depends on the order of its threads" in said or "reads shared memory that nothing has written" in said
    right = cuda(kernel(MISSING_BARRIER.format("__syncthreads();")), **kind)
    np.testing.assert_array_equal(right("k", np.zeros(64, np.float32), block=(64,))[0], np.arange(63, -1, -1))


REUSED = """__shared__ float s[64]; float v = t;
for (int i = 0; i < 3; i++) {{ s[t] = v; __syncthreads(); v = s[63 - t]; {} }}
x[t] = v;"""


@pytest.mark.parametrize("kind", [ORDERS, CHECKED], ids=["orders", "checked"])
def test_a_barrier_missing_before_shared_memory_is_used_again(cuda: CUDA, kind: dict[str, Any]) -> None:
    said = fault(cuda(kernel(REUSED.format("")), **kind), "k", np.zeros(64, np.float32), block=(64,))
    assert "depends on the order" in said or "with nothing between (shared memory)" in said
    cuda(kernel(REUSED.format("__syncthreads();")), **kind)("k", np.zeros(64, np.float32), block=(64,))


WARP_WIDE = "__shared__ float s[32]; s[t] = t; {} x[t] = s[31 - t];"


@pytest.mark.parametrize("kind", [ORDERS, CHECKED], ids=["orders", "checked"])
def test_lanes_of_a_warp_do_not_run_in_step(cuda: CUDA, kind: dict[str, Any]) -> None:
    fault(cuda(kernel(WARP_WIDE.format("")), **kind), "k", np.zeros(32, np.float32))
    for together in ("__syncwarp();", "__syncwarp(0xffffffffu);", "__shfl_sync(~0u, t, 0);"):
        cuda(kernel(WARP_WIDE.format(together)), **kind)("k", np.zeros(32, np.float32))


@pytest.mark.parametrize("kind", [ORDERS, CHECKED], ids=["orders", "checked"])
def test_blocks_that_write_one_place(cuda: CUDA, kind: dict[str, Any]) -> None:
    said = fault(cuda(kernel("if (!t) x[0] = blockIdx.x;"), **kind), "k", np.zeros(1, np.float32), grid=(3,))
    assert "depends on the order" in said or "writes what thread 0 of block" in said


def test_a_sum_whose_order_is_left_to_chance(cuda: CUDA) -> None:
    """Atomics are no race, but what floats add up to depends on who comes first."""
    run = cuda(kernel("atomicAdd(x, y[t]);", "float *x, const float *y"), orders=(0, 1))
    assert "depends on the order" in fault(run, "k", np.zeros(1, np.float32), normal(256), block=(256,))


SYNC = "__syncthreads (line"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            "if (t >= 40) return; __syncthreads();",
            f"threads 0-39 wait at {SYNC} 2); threads 40-63 have left the kernel",
        ),
        ("if (t < 32) __syncthreads();", f"threads 0-31 wait at {SYNC} 2); threads 32-63 have left the kernel"),
        (
            "if (t < 32) { __syncthreads(); }\n else __syncthreads();",
            f"threads 0-31 wait at {SYNC} 2); threads 32-63 wait at {SYNC} 3)",
        ),
        (
            "if (t < 7) __syncwarp(0xff);\n __syncthreads();",
            f"threads 0-6 wait at __syncwarp (line 2) for lanes 0-7; threads 7-63 wait at {SYNC} 3)",
        ),
        (
            "if (t % 2) __shfl_sync(0xffffffffu, t, 0); else __ballot_sync(0xffffffffu, t);",
            "wait at __ballot_sync (line 2) for lanes 0-31",
        ),
    ],
)
def test_a_barrier_that_not_all_reach(cuda: CUDA, body: str, says: str) -> None:
    said = fault(cuda(kernel(body, "")), "k", grid=(2,), block=(64,))
    assert says in said
    assert said.startswith("kernel k, block (0, 0, 0): ")


def test_a_lane_that_its_own_mask_lacks(cuda: CUDA) -> None:
    said = fault(cuda(kernel("x[t] = __shfl_sync(0xffff, t, 0);")), "k", np.zeros(32, np.float32))
    assert "thread (16, 0, 0): __shfl_sync (line 2) is called by lane 16, which its mask 0-15 lacks" in said


def test_a_lane_that_takes_no_part_gives_no_value(cuda: CUDA) -> None:
    run = cuda(kernel("if (t >= 20) return; x[t] = __shfl_xor_sync(0xffffffffu, (float)t, 16);"))
    (x,) = run("k", np.zeros(32, np.float32))
    np.testing.assert_array_equal(x[:20], [16, 17, 18, 19] + [np.nan] * 12 + [0, 1, 2, 3])


@pytest.mark.parametrize("type", ["float4", "uint4", "float2", "int", "unsigned short", "double"])
@pytest.mark.parametrize("load", ["*p", "__ldg(p)"])
def test_a_misaligned_vector(cuda: CUDA, type: str, load: str) -> None:
    before = (
        "template <class T> __device__ float first(T v) { return *(const float *)&v; }"
        if "4" in type or "2" in type
        else ""
    )
    use = f"first({load})" if before else load
    run = cuda(
        kernel(
            f"const {type} *p = (const {type} *)((char *)x + at); if (t == 1) *x = {use};", "float *x, int at", before
        )
    )
    assert "misaligned access" in fault(run, "k", np.zeros(64, np.float32), 1)
    run("k", np.zeros(64, np.float32), 16)


@pytest.mark.parametrize(
    ("launch", "says"),
    [
        ({"block": (1025,)}, r"block.x is 1025"),
        ({"block": (32, 64)}, r"a block of 2048 threads, the device allows 1024"),
        ({"block": (1, 1, 65)}, r"block.z is 65"),
        ({"block": (512,)}, r"a block of 512 threads, its __launch_bounds__ allow 256"),
        ({"grid": (1, 65536)}, r"grid.y is 65536, the device allows 1 to 65535"),
        ({"grid": (1, 1, 65536)}, r"grid.z is 65536"),
        ({"grid": (0,)}, r"grid.x is 0"),
        ({"shared": 48 * 1024 + 1}, r"49153 bytes of dynamic shared memory, it may have 49152"),
    ],
)
def test_launches_beyond_a_limit(cuda: CUDA, launch: dict[str, Any], says: str) -> None:
    with pytest.raises(CudaError, match=says):
        cuda('extern "C" __global__ void __launch_bounds__(256) k() {}')("k", **launch)


def test_a_grid_of_more_rows_than_its_second_axis_holds(cuda: CUDA) -> None:
    (x,) = cuda(kernel("if (!t) x[blockIdx.x] = blockIdx.x;", "int *x"))(
        "k", np.zeros(70_000, np.int32), grid=(70_000,)
    )
    np.testing.assert_array_equal(x, np.arange(70_000))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((1, 2, 3), "takes 4 arguments, not 3"),
        ((1, 2, 3, 4), "argument 3 of kernel k: int for a parameter that is a float of 4 bytes"),
        ((1, 1 << 33, 3, 4.0), "argument 1 of kernel k: 8589934592 for a parameter that is an integer of 4 bytes"),
        ((1, np.int64(2), 3, 4.0), "int64 for a parameter that is an integer of 4 bytes"),
        ((1.0, 2, 3, 4.0), "float for a parameter that is a pointer"),
        ((1, 2, 3.5, 4.0), "float for a parameter that is an integer of 8 bytes"),
    ],
)
def test_arguments_that_do_not_fit(cuda: CUDA, args: tuple[Any, ...], says: str) -> None:
    with pytest.raises(CudaError) as caught:
        cuda(kernel("", "float *x, int a, long long b, float c"))("k", *args)
    assert says in str(caught.value)


def test_a_kernel_that_is_not_extern_c_is_not_found_by_its_name(cuda: CUDA) -> None:
    run = cuda("__global__ void k() {}\ntemplate <int N> __global__ void m() {}")
    for name in "km":
        with pytest.raises(CudaError, match="CUDA_ERROR_NOT_FOUND"):
            run(name)


def test_text_that_does_not_compile(cuda: CUDA) -> None:
    with pytest.raises(CompileError, match=r"test.cu:3:.*undefined_thing"):
        cuda('\n#define X 1\nextern "C" __global__ void k(float *x) { *x = undefined_thing; }')


def test_an_integer_division_by_zero_and_a_shift_too_far(cuda: CUDA) -> None:
    assert "divided by zero" in fault(
        cuda(kernel("x[t] = 5 / n;", "float *x, int n")), "k", np.zeros(32, np.float32), 0
    )
    assert "a shift by 32" in fault(
        cuda(kernel("x[t] = 5u >> n;", "float *x, int n")), "k", np.zeros(32, np.float32), 32
    )


def test_more_local_memory_than_a_stack_holds(cuda: CUDA) -> None:
    body = "float big[100000]; for (int i = 0; i < 100000; i++) big[(i * 7919) % 100000] = i + n; x[t] = big[n];"
    assert "local memory" in fault(cuda(kernel(body, "float *x, int n")), "k", np.zeros(32, np.float32), 3)


def test_a_fault_leaves_the_device_usable(cuda: CUDA) -> None:
    run = cuda(kernel("__syncthreads(); if (n) x[1 << 20] = 1; __syncthreads(); x[t] = 2;", "float *x, int n"))
    for _ in range(3):
        fault(run, "k", np.zeros(64, np.float32), 1, block=(64,))
        assert (run("k", np.zeros(64, np.float32), 0, block=(64,))[0] == 2).all()


# -- the stream, and graphs -------------------------------------------------------------------------------------------

ADD = kernel("x[t] += y[t];", "float *x, const float *y")


def test_nothing_runs_before_somebody_waits(cuda: CUDA) -> None:
    run = cuda(ADD)
    d, k = run.driver, run.module.function("k")
    x, y, host = d.alloc(128), d.alloc(128), d.pinned(128)
    d.memset(x, 0, 128)
    host[:] = np.ones(32, np.float32).view(np.uint8)
    d.copy_to_device(y, host)
    d.launch(k, (1,), (32,), 0, [x, y])
    host[:] = np.full(32, 5, np.float32).view(np.uint8)  # too early: the copy has not run
    back = d.pinned(128)
    d.copy_to_host(back, x)
    assert (back == 0xFF).all()
    d.synchronize()
    assert (back.view(np.float32) == 5).all()


def test_a_graph_replays_with_what_its_pointers_hold(cuda: CUDA) -> None:
    run = cuda(ADD)
    d, k = run.driver, run.module.function("k")
    x, y, host, back = d.alloc(128), d.alloc(128), d.pinned(128), d.pinned(128)
    d.memset(x, 0, 128)
    d.begin_capture()
    d.copy_to_device(y, host)
    d.launch(k, (1,), (32,), 0, [x, y])
    d.copy_to_host(back, x)
    graph = d.end_capture()
    for n in (1, 2, 3):
        host[:] = np.full(32, n, np.float32).view(np.uint8)
        d.launch_graph(graph)
        d.synchronize()
    assert (back.view(np.float32) == 6).all()
    d.free(y)
    d.launch_graph(graph)
    with pytest.raises(RuntimeError, match="that was freed"):
        d.synchronize()


def test_what_a_capture_forbids(cuda: CUDA) -> None:
    d = cuda(ADD).driver
    x = d.alloc(128)
    forbidden = [
        d.synchronize,
        d.begin_capture,
        lambda: d.alloc(16),
        lambda: d.free(x),
        lambda: d.copy_to_host(np.empty(32, np.float32), x),
        lambda: d.copy_to_device(x, np.zeros(32, np.float32)),
    ]
    d.begin_capture()
    for act in forbidden:
        with pytest.raises(CudaError, match="CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"):
            act()
    d.end_capture()
    with pytest.raises(CudaError, match="no capture has begun"):
        d.end_capture()


def test_copies_beyond_an_allocation(cuda: CUDA) -> None:
    d = cuda(ADD).driver
    x, y = d.alloc(128), d.alloc(64)
    for act in (
        lambda: d.copy_to_device(y, np.zeros(17, np.float32)),
        lambda: d.copy_to_host(np.zeros(17, np.float32), y),
        lambda: d.copy(y, x, 65),
        lambda: d.memset(y + 1, 0, 64),
        lambda: d.copy(1234, x, 4),
    ):
        with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
            act()


@pytest.mark.parametrize("kind", [PLAIN, CHECKED], ids=["plain", "checked"])
def test_a_place_between_tensors_of_one_allocation(cuda: CUDA, kind: dict[str, Any]) -> None:
    run = cuda(kernel("if (!t) x[n] = 1;", "float *x, int n"), **kind)
    ptr = run.driver.alloc(512)
    run.driver.zone(ptr + 128, 64)
    run("k", ptr, 31)
    run("k", ptr, 48)
    assert "bytes" in fault(run, "k", ptr, 32)


def test_the_driver_has_what_the_protocol_asks_for(cuda: CUDA) -> None:
    asked = {n for n in vars(Driver) if not n.startswith("_")} | set(Driver.__annotations__)
    assert not [n for n in asked if not hasattr(cuda(ADD).driver, n)]
