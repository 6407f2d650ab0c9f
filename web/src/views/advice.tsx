/** Settings under which the job would be faster, as the server predicts them (core/penstock/advice), and "Run it". */
import { useEffect, useState } from "preact/hooks";
import { ApiError, api } from "../api";
import { firm, integer, plural } from "../format";
import { type Column, Empty, ErrorCard, Head } from "../parts/basics";
import { Submit } from "../parts/submit";
import type { JobStore } from "../store/job";
import type { AdvisedSetting, Advice as Answer, Job } from "../types";

const COLUMNS: readonly Column[] = [
  "Setting",
  ["Step, predicted", "num"],
  ["Samples/s", "num"],
  ["Threads busy", "num"],
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

const milliseconds = (ms: number): string => `${ms.toFixed(ms < 10 ? 2 : 1)}\u00a0ms`;
