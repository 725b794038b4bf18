// Builds the pages into the package: one script, one style and one template per page, whatever the machine.
//
//   node build.mjs            into ../src/headwise/show/page
//   node build.mjs FOLDER     into a new or empty folder, as the test does that compares the two

import { copyFile, mkdir, readdir, readFile, rm, writeFile } from "node:fs/promises";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";
import wabt from "wabt";

const here = dirname(fileURLToPath(import.meta.url));
const packaged = join(here, "../src/headwise/show/page");
const out = resolve(process.argv[2] ?? packaged);
const PAGES = ["heads", "explain", "slides"];
const NOTICES = { slides: ["reveal.js"] }; // packages whose licence asks for its text in every copy

/** Kernels in WebAssembly's text format, as bytes. */
const kernels = {
  name: "wat",
  setup(esbuild) {
    esbuild.onLoad({ filter: /\.wat$/ }, async ({ path }) => {
      const { parseWat } = await wabt();
      const module = parseWat(path, await readFile(path, "utf-8"), { simd: true });
      module.validate();
      const { buffer } = module.toBinary({});
      module.destroy();
      return { contents: buffer, loader: "binary" };
    });
  },
};

/** A package's name, version and licence, as a comment. */
async function notice(name) {
  const folder = join(here, "node_modules", name);
  const { version } = JSON.parse(await readFile(join(folder, "package.json"), "utf-8"));
  const licence = (await readFile(join(folder, "LICENSE"), "utf-8")).trim();
  return `/*! This file contains ${name} ${version}, under the MIT licence:\n\n${licence}\n*/`;
}

await mkdir(out, { recursive: true });
for (const name of await readdir(out)) {
  // Pages that are no more go; somebody's own files stay.
  if (out !== packaged) throw new Error(`${out} is not empty: it holds ${name}; name a new folder`);
  await rm(join(out, name), { recursive: true });
}
for (const page of PAGES) {
  const notices = await Promise.all((NOTICES[page] ?? []).map(notice));
  const options = {
    bundle: true,
    minify: true,
    target: "es2022",
    charset: "utf8",
    legalComments: "none",
    logLevel: "warning",
  };
  await build({
    ...options,
    entryPoints: [join(here, `src/${page}/main.ts`)],
    outfile: join(out, `${page}.js`),
    format: "iife",
    plugins: [kernels],
    banner: { js: notices.join("") },
  });
  await build({
    ...options,
    entryPoints: [join(here, `src/${page}/${page}.css`)],
    outfile: join(out, `${page}.css`),
  });
  await copyFile(join(here, `src/${page}/${page}.html`), join(out, `${page}.html`));
}
await writeFile(
  join(out, "README.md"),
  "Built from `page/` by `make page`; a test compares. Change the sources, not these files.\n",
);
