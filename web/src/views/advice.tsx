/** Settings, servers and trainers with which the job would be faster, as the server predicts (core/penstock/advice). */
import { useEffect, useState } from "preact/hooks";
import { ApiError, api } from "../api";
import { firm, integer, plural } from "../format";
import { type Column, Empty, ErrorCard, Head } from "../parts/basics";
import { Submit } from "../parts/submit";
import type { JobStore } from "../store/job";
import type { AdvisedCluster, AdvisedSetting, Advice as Answer, Job } from "../types";

const COLUMNS: readonly Column[] = [
  "Setting",
  ["Step, predicted", "num"],
  ["Samples/s", "num"],
  ["Threads busy", "num"],
  "Why",
  { bar: "Run it" },
];

const CLUSTER_COLUMNS: readonly Column[] = [
  "Servers, trainers, mode, link",
  ["Samples/s, predicted", "num"],
  ["Step", "num"],
  ["Waits", "num"],
  "Why",
  { bar: "Run it" },
];

export function AdviceView({ store }: { store: JobStore }) {
  const [answer, setAnswer] = useState<Answer | null>(null);
  const [error, setError] = useState<ApiError | null>(null);
  const ask = async () => {
    setError(null);
    try {
      setAnswer(await api.advice(store.jobId));
    } catch (failure) {
      if (!(failure instanceof ApiError)) throw failure;
      setError(failure);
    }
  };
  useEffect(() => void ask(), [store]);
  const job = store.job.value;
  return (
    <section class="panel" aria-labelledby="advice-title">
      <div class="panel-title">
        <h2 id="advice-title">Advice</h2>
        <em>{answer === null ? "" : basisOf(answer)}</em>
      </div>
      {error !== null && <ErrorCard error={error} retry={() => void ask()} />}
      {answer === null && error === null && <Empty title="Simulating the recorded steps…" />}
      {answer !== null && job !== null && <Ranked answer={answer} job={job} />}
      {answer !== null && answer.left_out.length > 0 && (
        <p class="muted">Too large to be simulated: {answer.left_out.join("; ")}</p>
      )}
      {answer !== null && job !== null && answer.clusters.length > 0 && <Clusters answer={answer} job={job} />}
      {answer !== null && answer.clusters_note !== "" && <p class="muted">{firm(answer.clusters_note)}</p>}
    </section>
  );
}

const basisOf = (answer: Answer): string =>
  `simulated from ${plural(answer.sampled_steps, "recorded step")} on ${answer.cores} cores; a step takes ${milliseconds(answer.step_ms)} now`;

function Ranked({ answer, job }: { answer: Answer; job: Job }) {
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Settings by predicted step time">
      <table data-testid="advice">
        <Head columns={COLUMNS} />
        <tbody>
          {answer.options.map((option) => (
            <Row key={option.name} option={option} job={job} measuredMs={answer.step_ms} />
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Row({ option, job, measuredMs }: { option: AdvisedSetting; job: Job; measuredMs: number }) {
  return (
    <tr class={option.current ? "is-current" : ""} data-testid={option.current ? "advice-current" : "advice-option"}>
      <td>
        {option.name}
        {option.current && <b> (now)</b>}
      </td>
      <td class="num" title={option.current ? "measured" : `${(measuredMs / option.step_ms).toFixed(2)} times as fast`}>
        {milliseconds(option.step_ms)}
      </td>
      <td class="num">{integer(option.samples_per_s)}</td>
      <td class="num">{`${Math.round(option.busy * 100)} %`}</td>
      <td class="why-cell">{firm(option.reason)}</td>
      <td>
        {!option.current && job.kind === "managed" && (
          <Submit job={job} label="Run it" about={option.name} env={option.env} testId="run-it" />
        )}
      </td>
    </tr>
  );
}

function Clusters({ answer, job }: { answer: Answer; job: Job }) {
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Servers and trainers by predicted samples per second">
      <table data-testid="advice-clusters">
        <Head columns={CLUSTER_COLUMNS} />
        <tbody>
          {answer.clusters.map((cluster) => (
            <ClusterRow key={cluster.name} cluster={cluster} job={job} />
          ))}
        </tbody>
      </table>
    </div>
  );
}

function ClusterRow({ cluster, job }: { cluster: AdvisedCluster; job: Job }) {
  const { pservers, trainers } = cluster;
  return (
    <tr class={cluster.current ? "is-current" : ""} data-testid="advice-cluster">
      <td>
        {cluster.name}
        {cluster.current && <b> (now)</b>}
      </td>
      <td class="num">{integer(cluster.samples_per_s)}</td>
      <td class="num" title={`${integer(cluster.rows)} rows`}>
        {milliseconds(cluster.step_ms)}
      </td>
      <td class="num">{`${Math.round((100 * cluster.wait_ms) / cluster.step_ms)} %`}</td>
      <td class="why-cell">{firm(cluster.reason)}</td>
      <td>
        {cluster.can_run && job.kind === "managed" && (
          <Submit job={job} label="Run it" about={cluster.name} sizes={{ pservers, trainers }} testId="run-cluster" />
        )}
      </td>
    </tr>
  );
}

const milliseconds = (ms: number): string => `${ms.toFixed(ms < 10 ? 2 : 1)}\u00a0ms`;
