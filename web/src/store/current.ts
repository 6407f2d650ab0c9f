/** The job that is on the page, for the parts that stand outside its view: badge, palette, keyboard, tests. */
import { signal } from "@preact/signals";
import type { GraphController } from "../graph/controller";
import type { TimelineController } from "../timeline/controller";
import type { JobStore } from "./job";
import type { JobsStore } from "./jobs";

export const currentJob = signal<JobStore | null>(null);
export const currentGraph = signal<GraphController | null>(null);
export const currentTimeline = signal<TimelineController | null>(null);
/** The list behind the jobs page; kept while logged in, so that the palette can offer jobs anywhere. */
export const jobsStore = signal<JobsStore | null>(null);
