"""Every tensor storage on the CPU as an event: an allocator in front of torch's own.

The profiler's memory events would miss storages that another thread frees (an exchange's memory, for one) and frees of
what is older than the profile. An allocator sees all threads and all temporaries inside operators. It is thirty
lines of C++, compiled when it is needed; memory that is no storage (oneDNN's scratch, Python's, numpy's) is not seen.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

_SOURCE = r"""
#include <c10/core/CPUAllocator.h>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {
struct Event { uint64_t pointer; int64_t bytes; };
std::mutex mutex;
std::unordered_map<uint64_t, int64_t> sizes;
std::vector<Event> events;
c10::Allocator* base = nullptr;
c10::DeleterFnPtr base_delete = nullptr;

// Noted before it happens, or another thread could be given the same address in between.
void note_and_delete(void* pointer) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = sizes.find(reinterpret_cast<uint64_t>(pointer));
    if (found != sizes.end()) {
      events.push_back({found->first, -found->second});
      sizes.erase(found);
    }
  }
  base_delete(pointer);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = base->raw_allocate(bytes);
    if (pointer != nullptr) {
      std::lock_guard<std::mutex> lock(mutex);
      auto key = reinterpret_cast<uint64_t>(pointer);
      sizes[key] = static_cast<int64_t>(bytes);
      events.push_back({key, static_cast<int64_t>(bytes)});
    }
    return {pointer, pointer, &note_and_delete, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &note_and_delete; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
}  // namespace

extern "C" int nep_install() {
  if (base != nullptr) return 0;
  c10::Allocator* found = c10::GetCPUAllocator();
  if (found->raw_deleter() == nullptr) return 1;
  base_delete = found->raw_deleter();
  base = found;
  static CountingAllocator counting;
  c10::SetCPUAllocator(&counting, 255);
  return 0;
}
extern "C" int64_t nep_num_events() {
  std::lock_guard<std::mutex> lock(mutex);
  return static_cast<int64_t>(events.size());
}
extern "C" void nep_read(Event* out, int64_t count) {
  std::lock_guard<std::mutex> lock(mutex);
  std::memcpy(out, events.data(), static_cast<size_t>(count) * sizeof(Event));
}
"""
EVENT = np.dtype([("pointer", np.uint64), ("bytes", np.int64)])


def find_compiler() -> str | None:
    """A C++ compiler of this machine: the one that CXX names, else g++ or clang++."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def compile_allocator(folder: Path) -> Path:
    """Compile the allocator against the torch that is installed; takes a few seconds.

    Args:
        folder: where the library goes.

    Raises:
        RuntimeError: there is no C++ compiler, or it fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("counting storages needs a C++ compiler; install g++, or name one in CXX")
    source, library = folder / "counting.cpp", folder / "counting.so"
    source.write_text(_SOURCE)
    root = Path(torch.__file__).parent
    abi = int(torch.compiled_with_cxx11_abi())
    command = [compiler, "-O1", "-std=c++20", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    command += [f"-I{root / 'include'}", str(source), "-o", str(library), f"-L{root / 'lib'}", "-lc10"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the counting allocator does not compile with {compiler}: {done.stderr[-500:]}")
    return library


class CountingAllocator:
    """Events of this process's storages from now on; storages that are older stay unseen.

    Args:
        library: see `compile_allocator`. Loading it twice counts once.

    Raises:
        RuntimeError: torch's allocator cannot be wrapped.
    """

    def __init__(self, library: Path):
        self._library = ctypes.CDLL(str(library))
        self._library.nep_num_events.restype = ctypes.c_int64
        self._library.nep_read.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        if self._library.nep_install():
            raise RuntimeError("this torch's CPU allocator has no raw interface, so it cannot be counted")

    @property
    def num_events(self) -> int:
        """How many allocations and frees there were."""
        return int(self._library.nep_num_events())

    def events(self) -> NDArray[np.void]:
        """All of them in order, `EVENT`: the storage's address and its bytes, negative where it is freed."""
        found = np.empty(self.num_events, dtype=EVENT)
        self._library.nep_read(found.ctypes.data, len(found))
        return found
