// A run's report: pages of the dashboard below each other, with the data that the file has.
import { embedded, h } from "./dom.js";
import { overviewPage, settingsPage } from "./overview.js";
import { servicePage } from "./service.js";

const main = document.getElementById("content");
for (const page of [overviewPage, ...(embedded.service ? [servicePage] : []), settingsPage]) {
  const part = h("section");
  main.append(part); // before it is drawn: charts need its width
  await page(part, embedded.state);
}
main.append(h("footer", {}, embedded.overview.footer));
