# embodrl on CPUs, with a Vulkan driver that renders without a GPU; runs as an ordinary user.
#
#   docker build -t embodrl .
#   docker run --rm -v "$PWD/outputs:/srv/embodrl/outputs" embodrl train env=toy runner=debug
FROM python:3.11-bookworm

ENV EMBODRL_YES=1 EMBODRL_TORCH=cpu PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

WORKDIR /opt/embodrl
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY scripts scripts
COPY configs configs
COPY embodrl embodrl

RUN scripts/install_system_packages.sh --python "$(command -v python3)" && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv \
    && bash -c 'source scripts/lib.sh && install_cpu_torch /opt/venv' \
    && /opt/venv/bin/python -m pip install -c constraints.txt '.[maniskill,datasets,lora,serve]'

RUN useradd --create-home --home-dir /srv/embodrl --uid 1000 embodrl && install -d -o embodrl /srv/embodrl/outputs
USER embodrl
WORKDIR /srv/embodrl
ENV PATH=/opt/venv/bin:$PATH
ENTRYPOINT ["embodrl"]
CMD ["--help"]
