# An image with the `roundpipe` command for NVIDIA GPUs, from this clone. README.md says how to start it.
#     docker build --tag roundpipe .
FROM python:3.12-slim-bookworm AS wheels
# rp-optim's kernels are compiled into its wheel.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir uv
WORKDIR /source
COPY pyproject.toml uv.lock LICENSE ./
COPY packages packages
RUN RP_OPTIM_WHEEL=compiled uv build --quiet --wheel --all-packages --out-dir /wheels

FROM python:3.12-slim-bookworm
# torch.compile and Triton compile on the machine that trains.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=wheels /wheels /wheels
# Ours first and from here: a package of one of these names on an index is not ours.
RUN pip install --no-cache-dir --no-index --no-deps /wheels/*.whl
ARG EXTRAS=cuda13,all
RUN pip install --no-cache-dir --find-links /wheels "rp-cli[${EXTRAS}]" && pip check && rm -rf /wheels
WORKDIR /work
ENTRYPOINT ["roundpipe"]
CMD ["--help"]
