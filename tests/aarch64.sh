#!/usr/bin/env bash
# Compiles the CPU kernels for aarch64 on another machine, and runs them under QEMU: every operator against float64
# (tests/ops/test_instruction_sets.py). It says nothing about speed. It is not a part of CI.
#
#     apt-get install g++-aarch64-linux-gnu qemu-user      # Debian, on any processor
#     bash tests/aarch64.sh                                # after `make install`; downloads 2.5 GB, needs 8 GB
#
# Python for aarch64 comes from Debian's packages, which apt downloads without changing this system, and torch from its
# wheel, which cannot be imported without NVIDIA's. Everything goes to build/aarch64. A second run downloads nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=$PWD/${VENV:-.venv}/bin
here=$PWD/build/aarch64
system=$here/system packages=$here/packages built=$here/built python=$here/python
for tool in aarch64-linux-gnu-g++ qemu-aarch64 apt-get dpkg-deb; do
    command -v "$tool" > /dev/null || {
        echo "$tool not found: apt-get install g++-aarch64-linux-gnu qemu-user" >&2
        exit 1
    }
done

# Debian 12, whose Python is 3.11
if [[ ! -x $python ]]; then
    rm -rf "$here/apt" "$system"
    mkdir -p "$here"/apt/{lists,archives}/partial "$system"
    touch "$here/apt/status"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm main" \
        > "$here/apt/sources.list"
    apt=(apt-get --quiet -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=
         -o Dir::Etc::SourceList="$here/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null
         -o Dir::State="$here/apt" -o Dir::State::Status="$here/apt/status" -o Dir::Cache="$here/apt")
    "${apt[@]}" update
    "${apt[@]}" install --yes --no-install-recommends --download-only python3.11 libstdc++6
    for package in "$here"/apt/archives/*.deb; do dpkg-deb --extract "$package" "$system"; done
    # torch asks these files for the processor, and QEMU would show those of this machine
    mkdir -p "$system/proc" "$system/sys/devices/system/cpu"
    printf '%s\t: %s\n' processor 0 Features 'fp asimd crc32 cpuid' 'CPU implementer' 0x41 'CPU architecture' 8 \
        'CPU variant' 0x0 'CPU part' 0xd08 'CPU revision' 3 > "$system/proc/cpuinfo"
    echo 0 | tee "$system/sys/devices/system/cpu/possible" > "$system/sys/devices/system/cpu/present"
    # for CMake, a Python that it can start
    printf '#!/bin/sh\nexec qemu-aarch64 -L %q %q "$@"\n' "$system" "$system/usr/bin/python3.11" > "$python"
    chmod +x "$python"
fi

# torch, and what the test imports, in the versions of constraints.txt
if [[ ! -d $packages ]]; then
    rm -rf "$packages.part"
    platforms=(--platform manylinux2014_aarch64 --platform manylinux2014_sbsa)
    for glibc in {17..39}; do platforms+=(--platform "manylinux_2_${glibc}_aarch64"); done
    "$bin/pip" install --quiet --disable-pip-version-check -c constraints.txt --no-compile --only-binary=:all: \
        --python-version 3.11 "${platforms[@]}" --target "$packages.part" torch numpy pytest pyyaml
    mv "$packages.part" "$packages"
fi

NASFAST_NATIVE=OFF "$bin/python" setup.py -q egg_info --egg-base build build --build-base "$here/setup" --build-lib "$built"
export PYTHONPATH=$built:$packages:$PWD/tests
"$bin/cmake" -G Ninja -S . -B "$here/cmake" -DCMAKE_MAKE_PROGRAM="$bin/ninja" -DNASFAST_CUDA=OFF \
    -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
    -DPython_EXECUTABLE="$python" \
    -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$built/nasfast"
"$bin/cmake" --build "$here/cmake"
cd tests/ops
NASFAST_ISA=baseline "$python" -u test_instruction_sets.py "$built/nasfast/_C.so"
