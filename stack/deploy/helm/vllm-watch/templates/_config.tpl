{{- /* Printed by `vllm-watch render` from stack/deploy/kubernetes and stack/deploy/helm. */ -}}
{{- define "vllm-watch.config" -}}
thresholds.yml: |
{{ .Files.Get "files/thresholds.yml" | indent 2 }}
{{- if or .Values.gateway.enabled .Values.sidecar.enabled }}
sidecar.yaml: |
  listen: 0.0.0.0:9401
  engines: {{- toYaml .Values.engines.endpoints | nindent 4 }}
  gpu: 'off'
  state: /var/lib/vllm-watch/state/sidecar.state
  events: /var/lib/vllm-watch/state/events.jsonl
  {{- if .Values.gateway.enabled }}
  requests_log:
    - /var/lib/vllm-watch/log/requests.jsonl
  {{- end }}
  {{- if or .Values.tls.existingSecret .Values.login.existingSecret }}
  web_config: /etc/vllm-watch/config/web.yml
  {{- end }}
  {{- if include "vllm-watch.severalGateways" . }}
  central: hostname
  {{- end }}
  {{- if include "vllm-watch.severalGateways" . }}
  peers:
    - url: {{ ternary "https://watch-gateways:9401" "http://watch-gateways:9401" (not (empty .Values.tls.existingSecret)) | quote }}
      {{- if or .Values.tls.existingSecret .Values.login.existingSecret }}
      http_config: /etc/vllm-watch/config/peers.yml
      {{- end }}
  {{- end }}
  {{- include "vllm-watch.lines" .Values.sidecar.settings | nindent 2 }}
{{- end }}
{{- if and (or .Values.gateway.enabled .Values.sidecar.enabled) (or .Values.tls.existingSecret .Values.login.existingSecret) }}
web.yml: |
  {{- if .Values.tls.existingSecret }}
  tls_server_config:
    cert_file: /etc/vllm-watch/tls/tls.crt
    key_file: /etc/vllm-watch/tls/tls.key
  {{- end }}
  {{- if .Values.login.existingSecret }}
  bearer_token_files:
    - /etc/vllm-watch/login/token
  {{- end }}
{{- end }}
{{- if and (include "vllm-watch.severalGateways" .) (or .Values.tls.existingSecret .Values.login.existingSecret) }}
peers.yml: |
  {{- if .Values.tls.existingSecret }}
  tls_config:
    ca_file: /etc/vllm-watch/tls/ca.crt
    server_name: watch-metrics
  {{- end }}
  {{- if .Values.login.existingSecret }}
  authorization:
    credentials_file: /etc/vllm-watch/login/token
  {{- end }}
{{- end }}
{{- if .Values.gateway.enabled }}
gateway.yaml: |
  listen: 0.0.0.0:8000
  metrics_listen: 0.0.0.0:8010
  requests_log: /var/lib/vllm-watch/log/requests.jsonl
  teams: /etc/vllm-watch/teams/teams.yaml
  engine_pages: false
  {{- if eq (len .Values.engines.endpoints) 1 }}
  upstream: {{ (first .Values.engines.endpoints).url | quote }}
  {{- end }}
  {{- if or .Values.tls.existingSecret .Values.login.existingSecret }}
  metrics_web_config: /etc/vllm-watch/config/web.yml
  {{- end }}
  {{- if include "vllm-watch.severalGateways" . }}
  timeouts:
    accept_grace_s: 5
  {{- end }}
  {{- if include "vllm-watch.severalGateways" . }}
  sharing:
    replicas_dns: watch-gateways
    {{- if include "vllm-watch.storeUrl" . }}
    store:
      url: {{ include "vllm-watch.storeUrl" . | quote }}
      fleet: {{ .Release.Namespace | quote }}
      {{- if include "vllm-watch.storeUser" . }}
      user: {{ include "vllm-watch.storeUser" . | quote }}
      {{- end }}
      {{- if .Values.store.existingSecret }}
      password_file: /etc/vllm-watch/store/password
      {{- end }}
      {{- if and .Values.store.existingSecret (regexMatch "^(rediss|valkeys):" .Values.store.url) }}
      ca_file: /etc/vllm-watch/store/ca.crt
      {{- end }}
    {{- end }}
  {{- end }}
{{- end }}
{{- if .Values.ship.dataset }}
ship.yaml: |
  dataset: {{ ternary "/var/lib/vllm-watch/state/dataset" .Values.ship.dataset (eq .Values.ship.dataset "volume") | quote }}
  cluster: {{ .Values.cluster | default .Release.Namespace | quote }}
  writer: {{ ternary "hostname" "gateway-0" (not (empty (include "vllm-watch.severalGateways" .))) | quote }}
  requests_log:
    - /var/lib/vllm-watch/log/requests.jsonl
  state: /var/lib/vllm-watch/state/ship
  listen: 0.0.0.0:9403
  seal_bytes: 16777216
  spool_bytes: 134217728
  {{- if hasPrefix "s3://" .Values.ship.dataset }}
  s3:
    region: {{ .Values.ship.region | quote }}
    {{- if .Values.ship.endpoint }}
    endpoint: {{ .Values.ship.endpoint | quote }}
    {{- end }}
    {{- if .Values.ship.existingSecret }}
    credentials_file: /etc/vllm-watch/ship/credentials
    {{- end }}
  {{- end }}
  {{- if or .Values.tls.existingSecret .Values.login.existingSecret }}
  web_config: /etc/vllm-watch/config/web.yml
  {{- end }}
{{- end }}
{{- end }}
{{- define "vllm-watch.spread" -}}
- maxSkew: 1
  topologyKey: kubernetes.io/hostname
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      app.kubernetes.io/name: vllm-watch-gateway
- maxSkew: 1
  topologyKey: topology.kubernetes.io/zone
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      app.kubernetes.io/name: vllm-watch-gateway
{{- end }}
