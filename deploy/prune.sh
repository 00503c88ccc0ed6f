#!/bin/sh
# prune ENVIRONMENT: delete what no service imports: tests, debug symbols, torch's headers and test programs, and the parts
# of Swagger that edit documents.
set -eu
packages=$(echo "$1"/lib/python3.*/site-packages)
find "$packages" -depth -type d \( -name tests -o -path "$packages/test" \
    -o -path '*/torch/test' -o -path '*/torch/include' -o -path '*/torch/share' \) -exec rm -rf {} +
find "$packages" -type f -path '*/torch/bin/*' ! -name torch_shm_manager -delete
find "$packages" -type f \( -name '*.map' -o -path '*/swagger_ui/static/swagger-editor*' \) -delete
# Not libraries that wheels carry beside their modules: their layout is patched, and strip may break it.
find "$packages" -type f -name '*.so' ! -path '*.libs/*' ! -path '*/torch/*' ! -path '*/nvidia/*' ! -path '*/triton/*' \
    -exec strip --strip-debug {} +
