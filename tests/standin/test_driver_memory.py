"""The stand-in for the CUDA driver: memory, what a pointer is, copies, kernels."""

from __future__ import annotations

import pytest
from helpers.standin import Standin
from helpers.standin_ranks import DRIVER, driver_value


@pytest.mark.parametrize(
    "spoil",
    [
        "check(driver.cuMemcpyDtoHAsync(out.ctypes.data, x + 8, 64, s))",
        "g.launch('fill_f32', s, x, 1.0, 17)",
        "check(driver.cuMemFree(x)); g.launch('fill_f32', s, x, 1.0, 16)",
    ],
)
def test_access_out_of_bounds_breaks_the_device(standin: Standin, spoil: str) -> None:
    """It is told asynchronously, and every later call of the process gets it too."""
    code = f"""
    g = Gpu()
    s, x, out = g.stream(), g.blank(64), np.zeros(16, np.float32)
    {spoil}
    print(json.dumps([status(driver.cuStreamSynchronize(s)), status(driver.cuMemcpyHtoD(x, out.ctypes.data, 4)),
                      status(driver.cuStreamQuery(s)), status(driver.cuMemAlloc(4))]))
    """
    assert driver_value(standin, code) == [700, 700, 700, 700]


def test_low_host_memory_is_no_device_memory(standin: Standin) -> None:
    """Before anything is allocated a kernel may read host memory at a low address, where some programs have theirs."""
    code = """
    g = Gpu()
    map_page = ctypes.CDLL(None).mmap
    map_page.restype = ctypes.c_void_p
    map_page.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    page = map_page(0x20000000, 4096, 3, 0x22, -1, 0)
    assert page < 1 << 38, hex(page)
    ctypes.c_uint32.from_address(page).value = 1
    s = g.stream()
    g.launch("wait_flag", s, page)
    print(json.dumps(status(driver.cuStreamSynchronize(s))))
    """
    assert driver_value(standin, code) == 0


def test_host_cannot_touch_device_memory(standin: Standin) -> None:
    """Reading through a device pointer ends the process, as on a GPU."""
    with standin.start(DRIVER + "g = Gpu()\nctypes.string_at(g.blank(64), 4)") as process:
        process.communicate(timeout=60)
    assert process.returncode == -11


def test_pointers_are_described(standin: Standin) -> None:
    """Device memory, pinned memory and ordinary memory are told apart, with device, context and range."""
    code = """
    g = Gpu(2)
    a = driver.CUpointer_attribute
    names = [a.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, a.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
             a.CU_POINTER_ATTRIBUTE_RANGE_SIZE, a.CU_POINTER_ATTRIBUTE_IS_MANAGED]
    def describe(pointer):
        found = check(driver.cuPointerGetAttributes(len(names), names, pointer))
        return [int(np.int64(int(value)).astype(np.int32)) for value in found]
    x, host = g.blank(100), np.zeros(4)
    pinned = int(check(driver.cuMemHostAlloc(64, 0)))
    pooled = int(check(driver.cuMemAllocAsync(32, 0)))
    context = a.CU_POINTER_ATTRIBUTE_CONTEXT
    same = int(check(driver.cuPointerGetAttribute(context, x + 99))) == int(g.context)
    print(json.dumps([describe(x + 99), describe(pinned), describe(host.ctypes.data), describe(pooled), same,
                      int(check(driver.cuPointerGetAttribute(context, pooled)) or 0),
                      status(driver.cuPointerGetAttribute(context, host.ctypes.data)),
                      status(driver.cuPointerGetAttribute(context, x + 100))]))
    """
    device, pinned, ordinary, pooled, same, owner, *refused = driver_value(standin, code)
    assert (device, pinned) == ([2, 2, 100, 0], [1, 2, 64, 0])
    assert (ordinary, pooled) == ([0, -2, 0, 0], [2, 2, 32, 0])
    assert same and owner == 0 and refused == [1, 1]


def test_memory_is_counted(standin: Standin) -> None:
    """There is as much as asked for; what is freed comes back; a pointer is freed once."""
    code = """
    g = Gpu()
    def free(): return int(check(driver.cuMemGetInfo())[0])
    start = free()
    x = g.blank(1 << 19)
    later = int(check(driver.cuMemAllocAsync(1 << 18, 0)))
    used = start - free()
    too_much = status(driver.cuMemAlloc(1 << 20))
    check(driver.cuMemFreeAsync(later, 0)); check(driver.cuMemFree(x))
    print(json.dumps([start, used, too_much, free(), status(driver.cuMemFree(x)), status(driver.cuMemFree(0))]))
    """
    found = driver_value(standin, code, STANDIN_MEMORY_MIB="1")
    assert found == [1 << 20, (1 << 19) + (1 << 18), 2, 1 << 20, 1, 0]


def test_copies_and_fills(standin: Standin) -> None:
    """Every copy and fill that the plane uses, and what a wrong direction gives."""
    code = """
    g = Gpu()
    s, host, back = g.stream(), np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    x, y = g.blank(64), g.blank(64)
    fresh = set(g.get(x, back).tolist())
    check(driver.cuMemcpyHtoDAsync(x, host.ctypes.data, 64, s))
    check(driver.cuMemcpyDtoDAsync(y, x, 64, s))
    check(driver.cuMemcpyAsync(y + 32, x, 16, s))
    check(driver.cuMemsetD8Async(y, 7, 4, s))
    check(driver.cuMemsetD16Async(y + 4, 0x0102, 2, s))
    check(driver.cuMemsetD32Async(y + 8, 0x01020304, 1, s))
    check(driver.cuMemcpyDtoHAsync(back.ctypes.data, y, 64, s))
    check(driver.cuStreamSynchronize(s))
    expected = np.concatenate([[7] * 4, [2, 1] * 2, [4, 3, 2, 1], host[12:32], host[:16], host[48:]])
    print(json.dumps([sorted(fresh), bool((back == expected).all()),
                      status(driver.cuMemcpyDtoD(x, host.ctypes.data, 4)),
                      status(driver.cuMemcpyHtoD(host.ctypes.data, host.ctypes.data, 4)),
                      status(driver.cuMemsetD32Async(y + 1, 0, 1, s))]))
    """
    assert driver_value(standin, code) == [[0xCB], True, 1, 1, 1]


def test_add_kernel_rounds_like_the_type(standin: Standin) -> None:
    """``bf16_add_inplace`` gives what ml_dtypes gives, infinities and subnormals included."""
    code = """
    from ml_dtypes import bfloat16
    g = Gpu()
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 1 << 16, (2, 50000), dtype=np.uint16)
    a, b = bits[0].view(bfloat16), bits[1].view(bfloat16)
    x, y, s = g.put(a), g.put(b), g.stream()
    g.launch("bf16_add_inplace", s, x, y, a.size)
    check(driver.cuStreamSynchronize(s))
    with np.errstate(all="ignore"):
        expected = (a.astype(np.float32) + b.astype(np.float32)).astype(bfloat16)
    got = g.get(x, a)
    nan = np.isnan(expected)
    print(json.dumps([bool((np.isnan(got) == nan).all()),
                      bool((got[~nan].view(np.uint16) == expected[~nan].view(np.uint16)).all())]))
    """
    assert driver_value(standin, code) == [True, True]


def test_images_and_kernels(standin: Standin) -> None:
    """An image that is none and a kernel that no image has are refused; a library's kernel launches like a module's."""
    code = """
    g = Gpu()
    library = check(driver.cuLibraryLoadData(b".version 8.0", [], [], 0, [], [], 0))
    kernel = check(driver.cuLibraryGetKernel(library, b"delay_us"))
    s, given = g.stream(), ((10,), (ctypes.c_uint32,))
    check(driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, s, given, 0))
    check(driver.cuStreamSynchronize(s))
    print(json.dumps([status(driver.cuModuleLoadData(b"rubbish")), status(driver.cuLibraryGetKernel(library, b"none")),
                      status(driver.cuLaunchKernel(kernel, 1, 1, 1, 2048, 1, 1, 0, s, given, 0))]))
    """
    assert driver_value(standin, code) == [200, 500, 1]
