{{- define "vllm-watch.labels" -}}
{{- $version := .Chart.Version | replace "+" "_" }}
{{- $own := dict "helm.sh/chart" (printf "%s-%s" .Chart.Name $version) "app.kubernetes.io/instance" .Release.Name }}
{{- $_ := set $own "app.kubernetes.io/version" .Chart.AppVersion }}
{{- $_ := set $own "app.kubernetes.io/managed-by" .Release.Service }}
{{- toYaml (merge $own .Values.commonLabels) }}
{{- end }}

{{- define "vllm-watch.operatorLabels" -}}
{{- toYaml (merge (fromYaml (include "vllm-watch.labels" .)) .Values.operatorLabels) }}
{{- end }}

{{- /* A mapping as lines of another one; nothing for an empty one. */}}
{{- define "vllm-watch.lines" -}}
{{- if . }}{{ toYaml . }}{{ end }}
{{- end }}

{{- define "vllm-watch.image" -}}
{{- with .Values.image.registry }}{{ . }}/{{ end }}{{ .Values.image.repository }}
{{- with .Values.image.digest }}@{{ . }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- /* Empty is the default, because Helm would merge a default with the user's own selector. */}}
{{- define "vllm-watch.enginePods" -}}
{{- toYaml (.Values.engines.podSelector | default (dict "matchLabels" (dict "app" "vllm"))) }}
{{- end }}

{{- define "vllm-watch.enginesSpeakTLS" -}}
{{- $plain := "" }}
{{- range .Values.engines.endpoints }}{{ if not (hasPrefix "https:" .url) }}{{ $plain = .url }}{{ end }}{{ end }}
{{- if not $plain }}true{{ end }}
{{- end }}

{{- define "vllm-watch.profile" -}}
{{- if or .Values.gateway.enabled .Values.sidecar.enabled }}full{{ else }}engine{{ end }}
{{- end }}

{{- /* "true" if there may be more than one gateway. */}}
{{- define "vllm-watch.severalGateways" -}}
{{- $several := or (gt (int .Values.gateway.replicas) 1) (gt (int .Values.gateway.autoscaling.maxReplicas) 0) }}
{{- if and .Values.gateway.enabled $several }}true{{ end }}
{{- end }}

{{- define "vllm-watch.storeUrl" -}}
{{- ternary "valkey://watch-store:6379/0" .Values.store.url .Values.store.valkey.enabled }}
{{- end }}

{{- define "vllm-watch.storeUser" -}}
{{- ternary "gateway" .Values.store.user .Values.store.valkey.enabled }}
{{- end }}

{{- define "vllm-watch.storePort" -}}
{{- $url := urlParse (include "vllm-watch.storeUrl" .) }}
{{- regexFind ":[0-9]+$" $url.host | trimPrefix ":" | default "6379" }}
{{- end }}

{{- define "vllm-watch.shipPort" -}}
{{- $url := urlParse (.Values.ship.endpoint | default "https://s3") }}
{{- regexFind ":[0-9]+$" $url.host | trimPrefix ":" | default "443" }}
{{- end }}

{{- define "vllm-watch.prometheus" -}}
{{- $operated := printf "http://prometheus-operated.%s.svc:9090" .Values.monitoring.namespace }}
{{- .Values.monitoring.prometheusUrl | default $operated }}
{{- end }}

{{- define "vllm-watch.prometheusPort" -}}
{{- $url := urlParse (include "vllm-watch.prometheus" .) }}
{{- $port := regexFind ":[0-9]+$" $url.host | trimPrefix ":" }}
{{- $port | default (ternary "443" "80" (eq $url.scheme "https")) }}
{{- end }}

{{- define "vllm-watch.runbooks" -}}
{{- $board := printf "http://watch-board.%s.svc:9402/runbooks" .Release.Namespace }}
{{- $url := .Values.links.runbooks | default (ternary $board "" .Values.board.enabled) }}
{{- include "vllm-watch.link" (list "links.runbooks" "https://wiki.example.org/runbooks" $url) }}
{{- end }}

{{- define "vllm-watch.dashboards" -}}
{{- $board := printf "http://watch-board.%s.svc:9402" .Release.Namespace }}
{{- $url := .Values.links.dashboards | default (ternary $board "" .Values.board.enabled) }}
{{- include "vllm-watch.link" (list "links.dashboards" "https://grafana.example.org" $url) }}
{{- end }}

{{- /* Name of a value, an example, and the address that it has. */}}
{{- define "vllm-watch.link" -}}
{{- $url := index . 2 }}
{{- if or (not $url) (regexMatch "^https?://(127\\.|localhost[:/]|localhost$|\\[::1\\])" $url) }}
{{- $what := "%s is missing or leads to one machine alone; set the address that people on call open, such as %s, or board.enabled" }}
{{- fail (printf $what (index . 0) (index . 1)) }}
{{- end }}
{{- $url }}
{{- end }}

{{- /* A file with the addresses of this release. */}}
{{- define "vllm-watch.file" -}}
{{- $root := index . 0 }}
{{- $text := $root.Files.Get (index . 1) }}
{{- $text = $text | replace "http://runbooks.vllm-watch.invalid" (include "vllm-watch.runbooks" $root) }}
{{- $text | replace "http://dashboards.vllm-watch.invalid" (include "vllm-watch.dashboards" $root) }}
{{- end }}

{{- define "vllm-watch.extra" -}}
{{- $object := index . 1 }}
{{- tpl (kindIs "string" $object | ternary $object (toYaml $object)) (index . 0) }}
{{- end }}

{{- define "vllm-watch.check" -}}
{{- $sidecar := or .Values.gateway.enabled .Values.sidecar.enabled }}
{{- if and .Values.engines.restrict (not .Values.gateway.enabled) }}
{{- fail "engines.restrict lets only a gateway reach the engines, and there is none; set gateway.enabled" }}
{{- end }}
{{- if and .Values.tls.existingSecret (not $sidecar) }}
{{- fail "tls.existingSecret protects the metrics of gateway and sidecar; set gateway.enabled or sidecar.enabled" }}
{{- end }}
{{- if and .Values.login.existingSecret (not $sidecar) }}
{{- fail "login.existingSecret protects the metrics of gateway and sidecar; set gateway.enabled or sidecar.enabled" }}
{{- end }}
{{- $several := include "vllm-watch.severalGateways" . }}
{{- $store := include "vllm-watch.storeUrl" . }}
{{- $most := int .Values.gateway.autoscaling.maxReplicas }}
{{- if and (gt $most 0) (le $most (int .Values.gateway.replicas)) }}
{{- fail "gateway.autoscaling.maxReplicas is no more than gateway.replicas; raise it, or set it to 0" }}
{{- end }}
{{- if and .Values.store.url .Values.store.valkey.enabled }}
{{- fail "store.url names a server of yours, and store.valkey.enabled adds one; leave one of them out" }}
{{- end }}
{{- if and $store (not $several) }}
{{- fail "a store is for several gateways; set gateway.enabled, and gateway.replicas to 2 or more" }}
{{- end }}
{{- if and .Values.store.valkey.enabled (not .Values.store.existingSecret) }}
{{- fail "store.valkey.enabled needs store.existingSecret, a secret with its password; there is no default one" }}
{{- end }}
{{- if and (or .Values.store.existingSecret .Values.store.user) (not $store) }}
{{- fail "store.existingSecret and store.user are for a store; set store.url or store.valkey.enabled" }}
{{- end }}
{{- if and .Values.store.user (or .Values.store.valkey.enabled (not .Values.store.existingSecret)) }}
{{- fail "store.user is a user of store.url, and needs store.existingSecret with its password" }}
{{- end }}
{{- $dataset := .Values.ship.dataset }}
{{- if and $dataset (not .Values.gateway.enabled) }}
{{- fail "ship.dataset is for the request log of the gateway; set gateway.enabled" }}
{{- end }}
{{- if and (or .Values.ship.endpoint .Values.ship.existingSecret) (not (hasPrefix "s3://" $dataset)) }}
{{- fail "ship.endpoint and ship.existingSecret are for a store; set ship.dataset to s3://bucket/prefix" }}
{{- end }}
{{- if and $dataset (contains "/" .Values.cluster) }}
{{- fail "cluster is a part of the data set's keys and must have no '/'; change it, or leave ship.dataset empty" }}
{{- end }}
{{- if and $dataset (not (regexMatch "^([2-9]|[1-9][0-9]+)Gi$|Ti?$" .Values.state.size)) }}
{{- fail "state.size is too small for ship.dataset, whose segments lie on that volume too; set it to 2Gi or more" }}
{{- end }}
{{- end }}
