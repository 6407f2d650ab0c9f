/** Jobs, newest first, and the trainers and pservers that are registered; all by websocket, nothing is polled. */

import { useEffect, useMemo, useRef } from "preact/hooks";
import { ApiError, api } from "../api";
import { age, clock, compact, firm, integer, metric, percent, plural, seconds, sentenceAndError } from "../format";
import { throttled } from "../frameloop";
import { Empty, ErrorCard, Head, Link, Progress, StateChip } from "../parts/basics";
import { Sparkline } from "../parts/sparkline";
import { jobHref, navigate, setQuery, url } from "../router";
import { stream } from "../socket";
import { jobsStore } from "../store/current";
import { isTerminal } from "../store/job";
import { arrange, counts, SORTS, type Sort, STATES, type StateTab, tabOf, wishOf } from "../store/joblist";
import { summary } from "../store/jobs";
import { JobSearch, listed } from "../store/jobsearch";
import { comparisonHref, LEAST_PICKED, MOST_PICKED, pickedOf, toggled } from "../store/picked";
import { nowMs } from "../store/session";
import { MOST_POINTS, Trends } from "../store/trends";
import type { Job } from "../types";
import { ReplicaTable } from "./replicas";

/** Of the jobs that were in view since the page was loaded. */
const trends = new Trends((jobId) => api.loss(jobId, MOST_POINTS));

/** How often the tabs' counts are asked for while jobs change. */
const RECOUNT_MS = 5000;
const ENDED = new Set(["EXITED", "KILLED", "LOST"]);

export function JobsPage() {
  const store = jobsStore.value;
  const jobs = store?.jobs.value ?? null;
  const rest = store?.more.value === true;
  const search = useSearch(rest);
  const offline = stream.state.value === "waiting" && jobs === null;
  return (
    <main class="page" id="main">
      <div class="page-head">
        <h1>Jobs</h1>
        {jobs !== null && <span class="muted">{summary(jobs, store?.total.value ?? null)}</span>}
      </div>
      {offline && (
        <ErrorCard
          error={new ApiError(0, "The live connection failed.", "Trying again by itself.")}
          retry={() => stream.retryNow()}
        />
      )}
      {jobs !== null && jobs.length > 0 && <JobTools count={(rest ? search.counts.value : null) ?? counts(jobs)} />}
      {rest && search.error.value !== null && (
        <ErrorCard error={search.error.value} retry={() => void search.refresh()} />
      )}
      <Picked />
      <div class="card">{jobs?.length === 0 ? <NoJobs /> : <Shown jobs={jobs} search={rest ? search : null} />}</div>
      {rest && <More search={search} />}
      {jobs !== null && <Registered jobs={jobs} />}
    </main>
  );
}

/** Asks for the jobs that the address wishes for, while the live list has not all of them. */
function useSearch(isOn: boolean): JobSearch {
  const search = useMemo(() => new JobSearch(), []);
  useEffect(() => () => search.dispose(), [search]);
  const address = url.value;
  useEffect(() => {
    if (isOn) search.want(wishOf(address.searchParams));
  }, [search, isOn, address]);
  const jobs = jobsStore.value?.jobs.value ?? null;
  const recount = useMemo(() => throttled(RECOUNT_MS, () => void search.recount()), [search]);
  useEffect(() => {
    if (isOn && jobs !== null) recount();
  }, [isOn, jobs]);
  return search;
}

function More({ search }: { search: JobSearch }) {
  if (!search.more.value) return null;
  return (
    <div class="older">
      <button
        type="button"
        class="btn"
        disabled={search.loading.value}
        onClick={() => void search.loadMore()}
        data-testid="load-more"
      >
        {search.loading.value ? "Loading…" : "Load more jobs"}
      </button>
    </div>
  );
}

/** How many are selected, and what to do with them. */
function Picked() {
  const picked = pickedOf(url.value.searchParams);
  if (picked.length === 0) return null;
  const isFew = picked.length < LEAST_PICKED;
  return (
    <div class="picked" role="status" data-testid="picked">
      <span>
        {plural(picked.length, "job")} selected
        {isFew && <span class="muted"> · select another one to compare with</span>}
        {picked.length === MOST_PICKED && <span class="muted"> · that is as many as can be compared</span>}
      </span>
      <button
        type="button"
        class="btn small primary"
        disabled={isFew}
        onClick={() => navigate(comparisonHref(picked))}
        data-testid="compare-picked"
      >
        Compare
      </button>
      <button type="button" class="btn small" onClick={() => setQuery({ pick: null })}>
        Clear
      </button>
    </div>
  );
}

function NoJobs() {
  return (
    <Empty title="No jobs yet">
      <span>Submit one, or start a training script with PENSTOCK_URL and PENSTOCK_TOKEN set.</span>
      <code>penstock submit job.yaml</code>
    </Empty>
  );
}

const STATE_LABEL: Readonly<Record<StateTab, string>> = {
  all: "All",
  running: "Running",
  failed: "Failed",
  waiting: "Waiting",
  done: "Ended",
};
const SORT_LABEL: Readonly<Record<Sort, string>> = {
  attention: "running and failed first",
  newest: "newest first",
  name: "by name",
  loss: "lowest loss first",
  speed: "fastest first",
};

/** States with their counts, a search, and the order; all of it is in the address. */
function JobTools({ count }: { count: Readonly<Record<StateTab, number>> }) {
  const wish = wishOf(url.value.searchParams);
  return (
    <div class="jobtools">
      <fieldset class="segments" aria-label="State">
        {STATES.map((state) => (
          <button
            key={state}
            type="button"
            class="btn small"
            aria-pressed={wish.state === state}
            data-testid={`state-${state}`}
            onClick={() => setQuery({ state: state === "all" ? null : state })}
          >
            {STATE_LABEL[state]} <span class="num">{integer(count[state])}</span>
          </button>
        ))}
      </fieldset>
      <input
        class="field"
        type="search"
        placeholder="Name, reason or id"
        aria-label="Search jobs"
        data-testid="job-search"
        value={wish.text}
        onInput={(event) => setQuery({ q: event.currentTarget.value || null })}
      />
      <select
        aria-label="Order"
        value={wish.sort}
        data-testid="job-sort"
        onChange={(event) =>
          setQuery({ sort: event.currentTarget.value === "attention" ? null : event.currentTarget.value })
        }
      >
        {SORTS.map((sort) => (
          <option key={sort} value={sort}>
            {SORT_LABEL[sort]}
          </option>
        ))}
      </select>
    </div>
  );
}

function Shown({ jobs, search }: { jobs: readonly Job[] | null; search: JobSearch | null }) {
  if (jobs === null) return <JobTable jobs={null} />;
  const wish = wishOf(url.value.searchParams);
  const found = search?.found.value ?? null;
  const shown = found === null ? arrange(jobs, wish) : listed(jobs, found, wish, search?.more.value === true);
  if (shown.length > 0) return <JobTable jobs={shown} />;
  if (search !== null && (found === null || search.loading.value)) return <JobTable jobs={null} />;
  return (
    <Empty title="No job is like this">
      <button type="button" class="btn" onClick={() => setQuery({ state: null, q: null })}>
        Show all {integer(Math.max(jobs.length, jobsStore.value?.total.value ?? 0))}
      </button>
    </Empty>
  );
}

function JobTable({ jobs }: { jobs: readonly Job[] | null }) {
  return (
    <table data-testid="jobs" aria-busy={jobs === null}>
      <Head
        columns={[
          { bar: "Select to compare", class: "pick" },
          "Job",
          "State",
          "Progress",
          ["Loss", "num tiny-hide"],
          ["Samples/s", "num tiny-hide"],
          ["Age", "num narrow-hide"],
          ["Why", "why-head narrow-hide"],
        ]}
      />
      <tbody>{jobs === null ? <Skeleton /> : jobs.map((job) => <JobRow key={job.id} job={job} />)}</tbody>
    </table>
  );
}

function Skeleton() {
  return [1, 2, 3].map((row) => (
    <tr key={row} class="skeleton">
      {[1, 2, 3, 4, 5, 6, 7, 8].map((cell) => (
        <td key={cell} />
      ))}
    </tr>
  ));
}

function JobRow({ job }: { job: Job }) {
  const href = jobHref(job.id);
  return (
    // The link in the first cell is what the keyboard uses; a click anywhere in the row is for the mouse.
    <tr class="link" onClick={() => navigate(href)} data-testid="job-row" data-job={job.id}>
      <PickCell job={job} />
      <td>
        <Link href={href} class="jobname">
          {job.name}
        </Link>
        {job.kind === "attached" && <span class="tag">attached</span>}
        {tabOf(job) !== "done" && job.state !== "RUNNING" && (
          <div class="why-small">
            <Reason job={job} />
          </div>
        )}
      </td>
      <td>
        <StateChip state={job.state} />
      </td>
      <td class="progress-cell">
        <JobProgress job={job} />
      </td>
      <td class="num tiny-hide">
        {job.latest.loss !== undefined && <LossTrend job={job} />}
        {metric(job.latest.loss)}
      </td>
      <td class="num tiny-hide">{job.latest.samples_per_s == null ? "–" : compact(job.latest.samples_per_s)}</td>
      <td class="num narrow-hide">{age(job.created_at, nowMs.value)}</td>
      <td class="why-cell narrow-hide">
        <Reason job={job} />
      </td>
    </tr>
  );
}

/** Selects a job for a comparison; a click beside the box counts, too, and opens no job. */
function PickCell({ job }: { job: Job }) {
  const picked = pickedOf(url.value.searchParams);
  const isPicked = picked.includes(job.id);
  return (
    <td class="pick" onClick={(event) => event.stopPropagation()}>
      <label>
        <input
          type="checkbox"
          aria-label={`Select ${job.name} of ${clock(job.created_at)} to compare`}
          checked={isPicked}
          disabled={!isPicked && picked.length >= MOST_PICKED}
          onChange={() => setQuery({ pick: toggled(picked, job.id) })}
          data-testid="pick"
        />
      </label>
    </td>
  );
}

/** How the loss came to what it is; asked for when the row is in view. */
function LossTrend({ job }: { job: Job }) {
  const place = useRef<HTMLSpanElement>(null);
  const { step, loss } = job.latest;
  useEffect(() => {
    const element = place.current;
    if (element === null) return;
    const observer = new IntersectionObserver(([seen]) => seen?.isIntersecting === true && trends.want(job.id));
    observer.observe(element);
    return () => observer.disconnect();
  }, [job.id]);
  useEffect(() => trends.carryOn(job.id, step, loss), [job.id, step, loss]);
  const trend = trends.of(job.id);
  return (
    <span ref={place}>
      <Sparkline at={trend?.step ?? []} values={trend?.loss ?? []} label={`Loss of ${job.name} over its steps`} />
    </span>
  );
}

/** The sentence, and of a failure the line of the log that has the error; both wrap. */
function Reason({ job }: { job: Job }) {
  const [sentence, error] = sentenceAndError(firm(job.why));
  return (
    <>
      {sentence}
      {error !== "" && <code>{error}</code>}
    </>
  );
}

export function JobProgress({ job }: { job: Job }) {
  const progress = job.progress;
  if (progress === null || progress.total <= 0) return <span class="faint">–</span>;
  const share = Math.min(1, progress.done / progress.total);
  const tone = job.state === "SUCCEEDED" ? "done" : job.state === "FAILED" ? "bad" : undefined;
  const left = !isTerminal(job) && job.eta_s !== null ? ` · ${seconds(job.eta_s)} left` : "";
  return (
    <>
      <Progress share={share} label={`Progress of ${job.name}`} {...(tone === undefined ? {} : { tone })} />
      <small class="muted">
        {percent(share)} {left}
      </small>
    </>
  );
}

function Registered({ jobs }: { jobs: readonly Job[] }) {
  const live = jobs.flatMap((job) => job.replicas.filter((one) => !ENDED.has(one.state)).map((one) => ({ job, one })));
  const trainers = live.filter(({ one }) => one.role === "trainer").length;
  const pservers = live.filter(({ one }) => one.role === "pserver").length;
  return (
    <section aria-labelledby="registered">
      <div class="page-head">
        <h2 id="registered">Trainers and parameter servers</h2>
        <span class="muted">
          {plural(trainers, "trainer")} · {plural(pservers, "pserver")} registered
        </span>
      </div>
      <div class="card">
        {live.length === 0 ? (
          <Empty title="Nothing is registered now" />
        ) : (
          <ReplicaTable replicas={live.map(({ one }) => one)} jobs={live.map(({ job }) => job)} />
        )}
      </div>
    </section>
  );
}
