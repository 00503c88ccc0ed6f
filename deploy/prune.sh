#!/bin/sh
# prune ENVIRONMENT [FILE]: delete what no service imports: tests, debug symbols, torch's headers and test programs.
# With FILE, only of what has changed after it.
set -eu
packages=$(echo "$1"/lib/python3.*/site-packages)
changed=${2:+-cnewer $2}
find "$packages" -depth -type d \( -name tests -o -path "$packages/test" \
    -o -path '*/torch/test' -o -path '*/torch/include' -o -path '*/torch/share' \) -exec rm -rf {} +
find "$packages" -type f -path '*/torch/bin/*' ! -name torch_shm_manager -delete
find "$packages" -type f -name '*.map' -delete
# Not libraries that wheels carry beside their modules: their layout is patched, and strip may break it.
# shellcheck disable=SC2086 # two words, or none
find "$packages" -type f -name '*.so' $changed ! -path '*.libs/*' ! -path '*/torch/*' ! -path '*/nvidia/*' \
    ! -path '*/triton/*' -exec strip --strip-debug {} +
