#!/usr/bin/env bash
# Builds llama.cpp's llama-server, and llama-quantize, for this processor, for side-by-side measurements.
#   ./setup_llamacpp.sh DIR        (10 to 20 minutes on 2 cores; needs a C++ compiler and only the package index)
set -euo pipefail
mkdir -p "${1:?usage: setup_llamacpp.sh DIR}/src"
dir=$(realpath "$1")
version=0.3.36
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q cmake ninja
# The source distribution of llama-cpp-python holds llama.cpp's source. Its version stands for llama.cpp's commit, which
# cmake would otherwise take from any Git repository around DIR.
"$dir/venv/bin/pip" download -q --no-deps --no-binary=:all: -d "$dir/src" "llama-cpp-python==$version"
tar -C "$dir/src" -xzf "$dir/src/llama_cpp_python-$version.tar.gz" --strip-components=1
"$dir/venv/bin/cmake" -S "$dir/src/vendor/llama.cpp" -B "$dir/build" -G Ninja \
  -DCMAKE_MAKE_PROGRAM="$dir/venv/bin/ninja" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
  -DLLAMA_BUILD_NUMBER=0 -DLLAMA_BUILD_COMMIT="llama-cpp-python-$version" -DLLAMA_BUILD_SERVER=ON \
  -DLLAMA_BUILD_UI=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF
"$dir/venv/bin/cmake" --build "$dir/build" --target llama-server llama-quantize
mkdir -p "$dir/bin"
cp "$dir"/build/bin/* "$dir/bin/"
"$dir/bin/llama-server" --version
