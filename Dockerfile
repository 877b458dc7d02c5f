FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /octavo
RUN python -m venv /opt/octavo && /opt/octavo/bin/pip install --no-cache-dir /octavo

FROM python:3.12-slim
COPY --from=build /opt/octavo /opt/octavo
RUN useradd --create-home octavo
USER octavo
ENV PATH=/opt/octavo/bin:$PATH
EXPOSE 8000
ENTRYPOINT ["octavo", "serve", "--host", "0.0.0.0"]
CMD ["demo"]
