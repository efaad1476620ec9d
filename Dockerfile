# embodrl, with a Vulkan driver that renders without a GPU; runs as an ordinary user.
#
#   docker build -t embodrl .
#   docker run --rm -v "$PWD/outputs:/srv/embodrl/outputs" embodrl train env=toy runner=debug
#
# For NVIDIA's GPUs, with their container toolkit:
#
#   docker build --build-arg TORCH=cuda -t embodrl:cuda .
#   docker run --rm --gpus all --shm-size=8g embodrl:cuda doctor
FROM python:3.11-bookworm

ARG TORCH=cpu
# all: CUDA, and the drivers' Vulkan and EGL, which simulators render with
ENV EMBODRL_YES=1 EMBODRL_TORCH=$TORCH NVIDIA_DRIVER_CAPABILITIES=all PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

WORKDIR /opt/embodrl
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY scripts scripts
COPY configs configs
COPY embodrl embodrl

RUN scripts/install_system_packages.sh --python "$(command -v python3)" && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv \
    && bash -c 'source scripts/lib.sh && install_${EMBODRL_TORCH}_torch /opt/venv' \
    && /opt/venv/bin/python -m pip install -c constraints.txt '.[maniskill,datasets,lora,serve]'

RUN useradd --create-home --home-dir /srv/embodrl --uid 1000 embodrl && install -d -o embodrl /srv/embodrl/outputs
USER embodrl
WORKDIR /srv/embodrl
ENV PATH=/opt/venv/bin:$PATH
ENTRYPOINT ["embodrl"]
CMD ["--help"]
