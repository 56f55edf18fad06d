{{- define "diptych.labels" -}}
app.kubernetes.io/part-of: diptych
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
diptych/pool: {{ . }}
{{- end }}
{{- end }}

{{- define "diptych.meta" -}}
name: {{ .name }}
labels:
  {{- include "diptych.labels" . | nindent 2 }}
  app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
  helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "diptych.image" -}}
{{ printf "%s%s%s:%s" .root.Values.images.prefix .service (.suffix | default "") (.root.Values.images.tag | default .root.Chart.AppVersion) }}
{{- end }}

{{- define "diptych.natsUrl" -}}
{{- if .Values.nats.embedded -}}
tls://{{ .Release.Name }}-nats:4222
{{- else -}}
{{ required "nats.url must name the server where nats.embedded is false" .Values.nats.url }}
{{- end -}}
{{- end }}

{{- /* What every service is told. `service` as in DIPTYCH_<SERVICE>__, `settings` its own. */}}
{{- define "diptych.environment" -}}
- {name: DIPTYCH_ALL__NATS_URL, value: {{ include "diptych.natsUrl" .root | quote }}}
- {name: DIPTYCH_ALL__LOG_LEVEL, value: {{ .root.Values.logLevel | quote }}}
- {name: DIPTYCH_ALL__OTLP_ENDPOINT, value: {{ .root.Values.otlpEndpoint | quote }}}
- {name: DIPTYCH_ALL__DRAIN_S, value: {{ .root.Values.drainSeconds | quote }}}
{{- $start := printf "DIPTYCH_%s__" (.service | upper | replace "-" "_") }}
{{- range $name, $value := .settings }}
- {name: {{ $start }}{{ $name }}, value: {{ $value | toString | quote }}}
{{- end }}
{{- end }}

{{- /* A service of ours: as root it reads its role's key, issues an identity, and runs on as user
10001 who cannot read it (docs/security.md). Nothing else of root is left to it. */}}
{{- define "diptych.container" -}}
- name: {{ .service }}
  image: {{ .image | default (include "diptych.image" .) }}
  imagePullPolicy: {{ .root.Values.images.pullPolicy }}
  command: [python, -m, diptych_chassis.containers.enter, {{ .service }}]
  args: {{ .args | default (list "serve") | toJson }}
  env:
    - name: POD_IP
      valueFrom: {fieldRef: {fieldPath: status.podIP}}
    - {name: DIPTYCH_SERVICE, value: {{ .service }}}
    {{- include "diptych.environment" . | nindent 4 }}
    {{- range .environment }}
    - {{ . | toJson }}
    {{- end }}
  ports:
    - {name: health, containerPort: 8081}
    {{- range $name, $port := .ports }}
    - {name: {{ $name }}, containerPort: {{ $port }}}
    {{- end }}
  startupProbe:
    httpGet: {path: /health/live, port: health}
    periodSeconds: 3
    failureThreshold: {{ div (.startSeconds | default 180 | int) 3 }}
  livenessProbe:
    httpGet: {path: /health/live, port: health}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  readinessProbe:
    httpGet: {path: /health/ready, port: health}
    periodSeconds: 3
    timeoutSeconds: 3
  resources: {{ .resources | default dict | toJson }}
  securityContext:
    runAsUser: 0
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: {drop: [ALL], add: [SETUID, SETGID, KILL]}
  volumeMounts:
    - {name: keys, mountPath: /run/keys, readOnly: true}
    - {name: tmp, mountPath: /tmp}
    {{- range .mounts }}
    - {{ . | toJson }}
    {{- end }}
{{- end }}

{{- define "diptych.keysVolume" -}}
- name: keys
  secret:
    secretName: {{ .root.Values.keys.prefix }}{{ .service }}
    items:
      - {key: role.key, path: role.key, mode: 0400}
      - {key: trust.pem, path: trust.pem, mode: 0444}
- name: tmp
  emptyDir: {medium: Memory, sizeLimit: {{ .tmp | default "64Mi" }}}
{{- end }}

{{- /* What a role's values say about where and how its pods run. */}}
{{- define "diptych.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ add .root.Values.drainSeconds 15 }}
securityContext: {seccompProfile: {type: RuntimeDefault}}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets: {{ . | toJson }}
{{- end }}
{{- range $name := list "nodeSelector" "tolerations" "affinity" }}
{{- with index $.values $name }}
{{ $name }}: {{ . | toJson }}
{{- end }}
{{- end }}
{{- end }}

{{- define "diptych.budget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "diptych.meta" . | nindent 2 }}
spec:
  maxUnavailable: 1
  selector: {matchLabels: {{ include "diptych.labels" . | fromYaml | toJson }}}
{{- end }}

{{- /* One of the roles that a stack has once. */}}
{{- define "diptych.role" -}}
{{- $made := merge (dict "name" (printf "%s-%s" .root.Release.Name .component) "settings" (.values.settings | default dict) "resources" .values.resources) . }}
{{- $settings := merge (dict) ($made.settings | default dict) (.own | default dict) }}
{{- $made = merge (dict "settings" $settings) $made }}
apiVersion: apps/v1
kind: Deployment
metadata:
  {{- include "diptych.meta" $made | nindent 2 }}
spec:
  {{- if not (kindIs "invalid" .values.replicas) }}
  replicas: {{ .values.replicas }}
  {{- end }}
  selector: {matchLabels: {{ include "diptych.labels" $made | fromYaml | toJson }}}
  strategy: {rollingUpdate: {maxUnavailable: 0, maxSurge: 1}}
  template:
    metadata:
      labels: {{ include "diptych.labels" $made | fromYaml | toJson }}
      annotations: {{ .values.annotations | default dict | toJson }}
    spec:
      {{- include "diptych.pod" $made | nindent 6 }}
      containers:
        {{- include "diptych.container" $made | nindent 8 }}
      volumes:
        {{- include "diptych.keysVolume" $made | nindent 8 }}
{{- end }}

{{- /* An engine in a process of its own: beside a worker, or for a whole pool. */}}
{{- define "diptych.engine" -}}
{{- $mine := .mine | default dict }}
- name: engine
  {{- if .sidecar }}
  restartPolicy: Always
  {{- end }}
  image: {{ .server.image }}
  {{- with .server.command }}
  command: {{ . | toJson }}
  {{- end }}
  args: {{ concat (.server.args | default list) ($mine.args | default list) | toJson }}
  env:
    - name: POD_IP
      valueFrom: {fieldRef: {fieldPath: status.podIP}}
    {{- range concat (.server.env | default list) ($mine.env | default list) }}
    - {{ . | toJson }}
    {{- end }}
  ports:
    {{- range $port, $number := merge (dict) ($mine.ports | default dict) .server.ports }}
    - {name: {{ $port }}, containerPort: {{ $number }}}
    {{- end }}
  startupProbe:
    httpGet: {path: {{ .server.ready }}, port: http}
    periodSeconds: 5
    failureThreshold: {{ div (.server.startSeconds | default 1800 | int) 5 }}
  livenessProbe:
    httpGet: {path: {{ .server.ready }}, port: http}
    periodSeconds: 10
    timeoutSeconds: 10
    failureThreshold: 6
  resources: {{ $mine.resources | default .server.resources | default dict | toJson }}
  securityContext:
    allowPrivilegeEscalation: false
    capabilities: {drop: [ALL]{{ with .server.capabilities }}, add: {{ . | toJson }}{{ end }}}
  volumeMounts:
    - {name: models, mountPath: /models, readOnly: true}
    - {name: shm, mountPath: /dev/shm}
{{- end }}
